"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.sampling.sample import portable as fast
from tercel.ops.sampling.sample import reference as naive
from tercel.ops.sampling.sample.contract import CONTRACT


@operation(CONTRACT, reference(naive.sample), portable(fast.sample), kernel("triton", naive.sample))
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    stream: int,
    filtered: bool,
    greedy: bool = False,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, and whether the row's logits allow one.

    Args:
        logits: [S, V] fp32 over the whole vocabulary; -inf bars a token.
        temperature: [S] fp32; 0 takes the largest logit, ties to the lower id.
        top_k: [S] i64; 0 keeps all.
        top_p: [S] fp32 in (0, 1]; 1 keeps all.
        min_p: [S] fp32 in [0, 1]; 0 keeps all.
        seeds: [S] i64, the requests' seeds.
        positions: [S] i64, absolute positions of the tokens drawn.
        stream: separates several draws at one position, such as a draft and its replacement.
        filtered: whether any row has top_k, top_p or min_p; False skips the sort.
        greedy: whether every temperature is 0; True skips the draw.
        counters: [COUNTERS] i32 zeros, left zero, that no other call uses meanwhile. With three a
            row, kernels that filter take two launches; without, up to six.
    Returns:
        (tokens [S] i64, finite [S] bool), newly allocated. A row with NaN, with +inf, or with
        -inf alone is not finite and gets token 0.
    Raises:
        ContractError: a shape or dtype outside the contract, a stream outside 32 bits.
    Wrong, silently:
        a row that filters with filtered=False; a temperature with greedy=True.
    Source: the sampling order of transformers and vLLM; Random123 for the draw.
    """
