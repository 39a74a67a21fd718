"""The weights of a drafter on one rank, of any published format."""

from dataclasses import dataclass
from operator import itemgetter

import torch

from tercel.core import drafter_parameters
from tercel.core.drafter import DrafterConfig
from tercel.core.drafter_parameters import DrafterWeights
from tercel.core.layout import Axis, Layout
from tercel.errors import ConfigError
from tercel.weights.build import Build, Packs, Progress, check_packs
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.drafter_table import Names, check_drafter_layout, drafter_table
from tercel.weights.manifest import check_tensors
from tercel.weights.problems import Problem, raise_problems
from tercel.weights.rows import Node

_ROWS = 4096
"""Rows of an embedding table that are compared at a time."""


@dataclass(frozen=True)
class StoredTable:
    """A matrix of a checkpoint, whose rows are read when they are asked for."""

    checkpoint: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.tensors[self.name].shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.checkpoint.reader().tensor(self.name, itemgetter(rows))


def load_drafter(
    checkpoint: Checkpoint,
    config: DrafterConfig,
    layout: Layout,
    rank: int,
    *,
    embed: torch.Tensor | StoredTable,
    dtype: torch.dtype,
    device: torch.device,
    packs: Packs | None = None,
    progress: Progress | None = None,
) -> DrafterWeights:
    """The weights of `rank`.

    A checkpoint may hold an embedding table. Where it is the target's, nothing is kept of it; where
    only the row of the mask token differs, that row; else the rank's part of it. The target's own
    table is never written to. Copies of the target's head are not loaded.

    Args:
        embed: [vocabulary, N] the target's whole embedding, on any device; it is only read.

    Raises:
        CheckpointError: lists everything that is wrong with the checkpoint; nothing is loaded then.
        ConfigError: the layout does not divide the drafter, the embedding is of another size, or a
            pack names no field.
    """
    build = _build(config, layout, rank, dtype, device, packs)
    names = Names(frozenset({*checkpoint.tensors, *checkpoint.unreadable}))
    table = drafter_table(config, names)
    _check(checkpoint, config, names, table)
    if tuple(embed.shape) != (config.vocab_size, config.hidden_size):
        raise ConfigError(
            f"embed: the target's table is {list(embed.shape)}, the drafter's config says "
            f"{[config.vocab_size, config.hidden_size]}"
        )
    own, mask_row = _embedding(checkpoint, names, config, embed, dtype)
    part = layout.local_range(Axis.VOCAB, rank, config.vocab_size)
    weights: DrafterWeights = build.model(
        table,
        build.load(table, checkpoint, progress),
        embed=None if own is None else own[part.start : part.stop].to(device, dtype),
        mask_row=None if mask_row is None else mask_row.to(device),
        inv_freq=_inv_freq(config, device),
    )
    return weights


def dummy_drafter(
    config: DrafterConfig,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    packs: Packs | None = None,
) -> DrafterWeights:
    """Random weights of the shapes that the config declares, with the target's embedding; on the
    meta device none."""
    build = _build(config, layout, rank, dtype, device, packs)
    fill = (lambda tensors, rows: None) if device.type == "meta" else build.draw(seed)
    weights: DrafterWeights = build.model(
        drafter_table(config, Names()),
        fill,
        embed=None,
        mask_row=None,
        inv_freq=_inv_freq(config, device),
    )
    return weights


def _build(
    config: DrafterConfig,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    packs: Packs | None,
) -> Build:
    check_drafter_layout(config, layout)
    check_packs(packs or {}, drafter_parameters)
    return Build(layout, rank, dtype, device, packs or {})


def _inv_freq(config: DrafterConfig, device: torch.device) -> torch.Tensor:
    return torch.tensor(config.rope.inverse_frequencies, dtype=torch.float32, device=device)


def _check(checkpoint: Checkpoint, config: DrafterConfig, names: Names, table: Node) -> None:
    """Raises CheckpointError listing what is missing, unknown or of another shape: a head that the
    config does not declare would otherwise be dropped and only lower the acceptance."""
    fields, problems = check_tensors(checkpoint, table)
    for stored in checkpoint.tensors.values():
        if stored.name == names.embed:
            wanted = (config.vocab_size, config.hidden_size)
            if stored.shape != wanted:
                text = f"has shape {list(stored.shape)}, expected {list(wanted)}"
                problems.append(Problem(stored.shard.name, stored.name, text))
        elif stored.name not in fields and stored.name not in names.shared:
            text = "is not a tensor of the drafter that config.json describes"
            problems.append(Problem(stored.shard.name, stored.name, text))
    heads = f"markov_rank is {config.markov_rank}, confidence head {config.confidence_head}"
    raise_problems(checkpoint.path, problems, f"config.json declares: {heads}")


def _embedding(
    checkpoint: Checkpoint,
    names: Names,
    config: DrafterConfig,
    embed: torch.Tensor | StoredTable,
    dtype: torch.dtype,
) -> tuple[StoredTable | None, torch.Tensor | None]:
    """(its own table, the mask token's row on the CPU): at most one of them."""
    if names.embed is None:
        return None, None
    table = StoredTable(checkpoint, names.embed)
    mask_differs = False
    for start in range(0, config.vocab_size, _ROWS):
        rows = slice(start, start + _ROWS)
        theirs = embed[rows].to("cpu", dtype)
        ours = table[rows].to(dtype)
        different = (ours != theirs).any(1).nonzero().flatten() + start
        if bool((different != config.mask_token_id).any()):
            return table, None
        mask_differs = mask_differs or different.numel() > 0
    if not mask_differs:
        return None, None
    mask = config.mask_token_id
    return None, table[mask : mask + 1][0].to(dtype)
