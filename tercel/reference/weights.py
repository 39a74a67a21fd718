"""How weights get into the reference: from checkpoint tensors, at random, in another dtype."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tercel.reference.kimi_k3 import Model

FP32_PARAMETERS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
"""Endings of the parameters that the checkpoint stores in fp32; the rest are bf16 or MXFP4."""


def cast(model: Model, dtype: torch.dtype) -> Model:
    """In place: every parameter to `dtype`, but never an fp32 tensor of the checkpoint to less."""
    for name, parameter in model.named_parameters():
        keep = name.endswith(FP32_PARAMETERS) and dtype != torch.float64
        parameter.data = parameter.data.to(torch.float32 if keep else dtype)
    return model


def init_weights(model: Model, seed: int) -> None:
    """Random weights for training: normal matrices, unit norms, decays spread over two decades."""
    generator = torch.Generator().manual_seed(seed)
    bound = model.config.gate_lower_bound
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape)
        if name.endswith(("norm.weight", "A_log")):
            value.fill_(0.0 if name.endswith("A_log") else 1.0)
        elif name.endswith("e_score_correction_bias"):
            value.zero_()
        elif name.endswith("dt_bias"):
            # With exp(A_log) = 1 the inverse of the gate at f = 0: -g log-uniform in [0.001, 0.1].
            rate = 10 ** value.uniform_(-3, -1, generator=generator)
            value = torch.expm1(rate).log() if bound is None else torch.logit(rate / -bound)
        else:
            value.normal_(0.0, model.config.initializer_range, generator=generator)
        parameter.data.copy_(value)


def dequantize_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """packed [out, in/2] uint8, scale [out, in/32] uint8 (e8m0) -> [out, in] fp32, exact.

    A byte holds two e2m1 codes, the earlier element in its low nibble.
    Source: OCP Microscaling formats v1.0; compressed-tensors `mxfp4-pack-quantized`.
    """
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = torch.cat([magnitudes, -magnitudes])[codes].unflatten(-1, (-1, 32))
    return torch.ldexp(values, scale[..., None].int() - 127).flatten(-2)


def load_checkpoint_tensors(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Copies checkpoint-named tensors into the model, converting to its parameters' dtype.

    Accepts names with and without `language_model.`, experts as MXFP4 (`weight_packed` and
    `weight_scale`) or plain (`weight`); skips the vision tower and its projector.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape, or A_log's padding is not 0.
    """
    skip = ("vision_tower.", "mm_projector.")
    names = {name.removeprefix("language_model."): name for name in tensors}
    unused = {short for short in names if not short.startswith(skip)}

    def take(short: str) -> Tensor:
        if short not in names:
            raise ValueError(f"the checkpoint lacks {short}")
        unused.discard(short)
        return tensors[names[short]]

    def matrix(short: str) -> Tensor:
        if f"{short}.weight_packed" not in names:
            return take(f"{short}.weight")
        return dequantize_mxfp4(take(f"{short}.weight_packed"), take(f"{short}.weight_scale"))

    for name, parameter in model.named_parameters():
        parent, _, leaf = name.rpartition(".")
        if leaf in ("w1", "w2", "w3"):
            stack = [matrix(f"{parent}.{expert}.{leaf}") for expert in range(len(parameter))]
            value = torch.stack(stack)
        else:
            value = take(name)
        if leaf == "A_log":
            value, padding = value.flatten().tensor_split([len(parameter)])
            if padding.any():
                raise ValueError(f"{name}: entries past num_heads = {len(parameter)} must be zero")
        if value.shape != parameter.shape:
            raise ValueError(f"{name} is {list(value.shape)}; expected {list(parameter.shape)}")
        parameter.data.copy_(value)
    if unused:
        raise ValueError(f"the checkpoint has {len(unused)} unknown tensors: {sorted(unused)[:8]}")
