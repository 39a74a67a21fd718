"""Acceptance of a drafter, by decoding held-out problems in rounds without a cache.

Every round runs the whole rows again, through the reference of target and drafter, and takes the
engine's acceptance rules; only speed differs from how the engine decodes.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercel.core.group import SingleGroup
from tercel.core.sampling import Stream
from tercel.gates.problems import generate
from tercel.ops._lib.philox import gumbel
from tercel.ops.spec.accept import accept
from tercel.reference.drafter import Drafter
from tercel.runtime.chat.encoding import render
from tercel.runtime.chat.segments import encode
from tercel.runtime.tokenizer import Tokenizer
from training.dspark.target import Target

LENGTH = 320
SEED = 30_000_001


def evaluate(
    target: Target, drafter: Drafter, model_dir: Path, count: int
) -> Iterator[dict[str, Any]]:
    """Figures of `count` problems per setting: greedy, and temperature 1 under each rule."""
    tokenizer = Tokenizer.load(model_dir)
    prompts = [
        encode(tokenizer, render([{"role": "user", "content": problem.question}]))
        for problem in islice(generate(SEED), count)
    ]
    for temperature, rule in ((0.0, "match"), (1.0, "match"), (1.0, "token"), (1.0, "block")):
        figures = decode(target, drafter, prompts, temperature, rule, tokenizer.stop_ids)
        yield {"temperature": temperature, "rule": rule, **figures}


def choose(
    temperature: float, seeds: Tensor, positions: Tensor, logits: Tensor, slot: int
) -> Tensor:
    """A slot's token [R, 1] from logits [R, 1, V], with the engine's random numbers of drafts."""
    if temperature == 0:
        return logits.argmax(-1)
    stream = torch.full_like(positions, int(Stream.DRAFT) + slot)
    noise = gumbel(seeds, positions, stream, 0, logits.shape[-1])
    return (logits[:, 0].double() / temperature + noise).argmax(-1, keepdim=True)


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    temperature: float,
    rule: str,
    stop_ids: frozenset[int],
) -> dict[str, Any]:
    """Acceptance over all rounds of all prompts; a round counts all that it accepted."""
    c, device = drafter.config, target.embed.device
    slots = c.block_size if c.anchor_predicts else c.block_size - 1
    rows = torch.zeros(len(prompts), LENGTH, dtype=torch.long, device=device)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    stops = torch.tensor(sorted(stop_ids), device=device)
    zero, heat = torch.zeros_like(lengths), torch.full(lengths.shape, temperature, device=device)
    seeds = torch.arange(len(prompts), device=device)
    ahead = torch.arange(slots + 1, device=device)
    is_open = torch.ones_like(lengths, dtype=torch.bool)
    # Nothing is drafted for the token after the prompt.
    drafts, draft_logits = lengths.new_zeros(len(prompts), slots), None
    counts = zero
    reached, tokens, rounds = lengths.new_zeros(slots), 0, 0
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    while bool(is_open.any()):
        anchor = lengths - 1
        seen = target.see(rows, c)
        where = (anchor[:, None] + ahead)[..., None].expand(-1, -1, seen.hidden.shape[-1])
        kept, accepted, _ = accept(
            target.logits(seen.hidden.gather(1, where)).flatten(0, 1),
            drafts,
            draft_logits,
            counts,
            heat,
            zero,
            torch.ones_like(heat),
            torch.zeros_like(heat),
            seeds,
            anchor,
            group=SingleGroup(),
            rule=rule,
            filtered=False,
            greedy=temperature == 0,
        )
        stopped = torch.isin(kept, stops) & (ahead <= accepted[:, None])
        new = torch.where(stopped.any(1), stopped.long().argmax(1), accepted) + 1
        new = torch.where(is_open, new, 0)
        if draft_logits is not None:
            reached += (
                is_open[:, None] & (torch.minimum(accepted, new)[:, None] > ahead[:-1])
            ).sum(0)
            rounds += int(is_open.sum())
            tokens += int(new.sum())
        place = (lengths[:, None] + ahead).clamp(max=LENGTH - 1)
        rows.scatter_(1, place, torch.where(is_open[:, None], kept, rows.gather(1, place)))
        lengths = lengths + new
        is_open = is_open & ~stopped.any(1) & (lengths + 2 * slots + 2 < LENGTH)

        with autocast:
            anchors = (lengths - 1)[:, None]
            tokens_there = rows.gather(1, anchors)
            draft = drafter.draft(
                seen.taps,
                tokens_there,
                anchors,
                slots,
                target.embed,
                target.head,
                partial(choose, temperature, seeds, lengths - 1),
            )
        drafts, draft_logits = draft.tokens[:, 0], draft.logits[:, 0].flatten(0, 1)
        counts = zero + slots
        place = (lengths[:, None] + ahead[:-1]).clamp(max=LENGTH - 1)
        rows.scatter_(1, place, torch.where(is_open[:, None], drafts, rows.gather(1, place)))
    share = (reached / max(rounds, 1)).tolist()
    before = [1.0, *share[:-1]]
    return {
        "rounds": rounds,
        "acceptance_length": round(tokens / max(rounds, 1), 4),
        "per_position": [round(x, 4) for x in share],
        "conditional": [round(x / y, 4) if y else 0.0 for x, y in zip(share, before, strict=True)],
    }
