"""From a drafter checkpoint to what a rank drafts with."""

import logging
from pathlib import Path
from typing import Any

import torch

from tercel.config import EngineConfig
from tercel.core.arch import Arch, arch_of
from tercel.core.drafter import DrafterConfig
from tercel.core.drafter_formats import read_drafter_config
from tercel.core.layout import Axis, Layout
from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.runtime.draft_runner import DraftRunner, TapBuffer
from tercel.runtime.proposals import SUFFIX, SUFFIX_DRAFTS
from tercel.targets.drafters import Drafter, DrafterPlan, create_drafter
from tercel.targets.load import Plan
from tercel.targets.program import Program
from tercel.targets.state import CacheSizes, create_board, create_drafter_cache
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.drafter import StoredTable, load_drafter
from tercel.weights.drafter_table import check_drafter_layout
from tercel.weights.fingerprint import fingerprint

_LOG = logging.getLogger(__name__)


def open_drafter(config: EngineConfig, model: ModelConfig) -> DrafterConfig | None:
    """What config.drafter holds; None where there is none, or it needs no model.

    Raises:
        ConfigError: it cannot be read, was made for another model, or the layout does not divide
            it.
    """
    if config.drafter is None or config.drafter == SUFFIX:
        return None
    drafter = read_drafter_config(Path(config.drafter))
    drafter.check_target(model)
    check_drafter_layout(drafter, Layout.parse(config.layout))
    if config.max_drafts is not None:
        drafter.width(config.max_drafts)
    return drafter


def max_drafts_of(config: EngineConfig, drafter: DrafterConfig | None) -> int:
    """Guesses per request that a step may verify; 0 without a drafter.

    Raises:
        ConfigError: more of them are to be accepted.
    """
    if config.drafter is None:
        return 0
    most = config.max_drafts or (SUFFIX_DRAFTS if drafter is None else drafter.max_drafts)
    if (config.forced_acceptance or 0) > most:
        raise ConfigError(
            f"forced_acceptance={config.forced_acceptance}: {most} guesses are verified per step; "
            f"choose 0 .. {most}"
        )
    return most


def start_drafting(
    config: EngineConfig,
    drafter: DrafterConfig,
    plan: Plan,
    program: Program,
    sizes: CacheSizes,
    device: torch.device,
) -> DraftRunner:
    """What a rank drafts with: every pipeline stage captures taps, the last one drafts."""
    norm, layout = program.weights.layers[0].input_norm, plan.place.layout
    tokens = max(config.max_step_tokens, plan.route.row.limits.decode_max_tokens)
    kind: dict[str, Any] = {"dtype": plan.dtype, "device": device}
    logits = None
    if config.acceptance != "match":
        shape = (sizes.num_slots, sizes.max_draft, drafter.vocab_size // layout.tp)
        logits = torch.zeros(shape, dtype=torch.float32, device=device)
    is_last = plan.place.is_last_stage
    board = create_board(config.max_running, sizes.max_draft, device) if is_last else None
    return DraftRunner(
        TapBuffer(drafter.taps, drafter.tap_stream, tokens, norm),
        _load(config, drafter, plan, program, kind, board) if is_last else None,
        create_drafter_cache(drafter, layout, sizes=sizes, **kind),
        logits=logits,
    )


def _load(
    config: EngineConfig,
    drafter: DrafterConfig,
    plan: Plan,
    program: Program,
    kind: dict[str, Any],
    board: torch.Tensor | None,
) -> Drafter:
    target, place = Checkpoint.open(config.model), plan.place
    if drafter.target_fingerprint not in (None, fingerprint(target)):
        _LOG.warning(
            "drafter %s was trained for another checkpoint than %s; fewer guesses may be accepted",
            config.drafter,
            config.model,
        )
    (name,) = (name for name in target.tensors if name.endswith("embed_tokens.weight"))
    table = StoredTable(target, name)
    embed, head = program.weights.embed, program.weights.head
    assert head is not None, "the last stage holds the head"
    if embed is None:  # the first stage's
        own = place.layout.local_range(Axis.VOCAB, place.rank, place.model.vocab_size)
        embed = table[own.start : own.stop].to(**kind)
    assert config.drafter is not None
    checkpoint, rank = Checkpoint.open(config.drafter, "drafter"), place.rank % place.layout.tp
    weights = load_drafter(checkpoint, drafter, place.layout, rank, embed=table, **kind)
    return create_drafter(
        DrafterPlan(
            row=plan.route.row,
            arch=arch_of(kind["device"]) or Arch.CPU,
            config=drafter,
            weights=weights,
            embed=embed,
            head=head,
            group=program.groups.tp,
            counts=program.counts,
            board=board,
        )
    )
