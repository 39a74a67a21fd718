"""From a checkpoint directory to something that runs plans on this process's device."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercel.config import EngineConfig
from tercel.core.arch import Arch, arch_of
from tercel.core.drafter import DrafterConfig
from tercel.core.drafter_formats import read_drafter_config
from tercel.core.group import Groups
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.parameters import ModelWeights
from tercel.core.rank import Rank
from tercel.errors import CheckpointError
from tercel.parallel import SingleGroup
from tercel.runtime.draft_runner import DraftRunner, TapBuffer
from tercel.runtime.forced import ForcedAcceptance
from tercel.runtime.model_runner import ModelRunner
from tercel.runtime.proposals import SUFFIX, SUFFIX_DRAFTS
from tercel.runtime.ranks import RANK_MAIN, Ranks
from tercel.runtime.runner import OpenModel, ReportProgress, Runner
from tercel.runtime.sampler import Sampler
from tercel.runtime.tokenizer import Tokenizer
from tercel.targets.drafters import DrafterPlan, create_drafter
from tercel.targets.load import Plan, device_of, dtype_of, resolve
from tercel.targets.program import Program
from tercel.targets.state import CacheSizes, create_cache, create_drafter_cache
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.drafter import load_drafter
from tercel.weights.drafter_table import check_drafter_layout
from tercel.weights.fingerprint import fingerprint
from tercel.weights.load import dummy_model, load_model

_LOG = logging.getLogger(__name__)
BYTES_PER_THREAD = 64 << 20


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose configuration and tokenizer are read, and nothing else."""

    config: EngineConfig
    model: ModelConfig
    tokenizer: Tokenizer
    device: torch.device
    drafter: DrafterConfig | None = None
    """None: nothing is drafted, or without a model."""
    local_size: int = 1
    """Ranks that share this host's cores."""

    @property
    def max_drafts(self) -> int:
        """Guesses per request and step that a step may verify."""
        if self.config.drafter is None:
            return 0
        trained = SUFFIX_DRAFTS if self.drafter is None else self.drafter.max_drafts
        return min(trained, self.config.max_drafts or trained)

    def plan(self, rank: int, resolve: Callable[..., Plan] = resolve) -> Plan:
        """The program of a rank.

        Raises:
            ConfigError, NoTarget: what is wrong with the configuration, and the fix.
        """
        arch, dtype = arch_of(self.device), dtype_of(self.config, self.device)
        return resolve(self.model, self.config, arch=arch, dtype=dtype, rank=rank)


def open_files(config: EngineConfig, *, local_rank: int = 0, local_size: int = 1) -> Opened:
    """Reads the configuration and the tokenizer of config.model, for one of the ranks of a host.

    Raises:
        ConfigError, CheckpointError: what is wrong, and the fix.
    """
    model_dir = Path(config.model)
    model = ModelConfig.load(model_dir)
    tokenizer = Tokenizer.load(model_dir)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{model_dir}: the tokenizer has {tokenizer.vocab_size} tokens and config.json a "
            f"vocab_size of {model.vocab_size}; one of them belongs to another model"
        )
    device = device_of(config)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank)
    return Opened(config, model, tokenizer, device, _open_drafter(config, model), local_size)


def _open_drafter(config: EngineConfig, model: ModelConfig) -> DrafterConfig | None:
    if config.drafter is None or config.drafter == SUFFIX:
        return None
    drafter = read_drafter_config(Path(config.drafter))
    drafter.check_target(model)
    check_drafter_layout(drafter, Layout.parse(config.layout))
    if config.max_drafts is not None:
        drafter.width(config.max_drafts)
    return drafter


def open_checkpoint(
    config: EngineConfig,
    *,
    resolve: Callable[..., Plan] = resolve,
    rank_main: str = RANK_MAIN,
) -> OpenModel:
    """Reads configuration and tokenizer, and resolves the target; the weights come with `load`.

    Args:
        resolve: as tercel.targets.load.resolve; another one serves another plan, on one rank.
        rank_main: module:function that a process of a rank runs, where the layout has several.
    Raises:
        ConfigError, CheckpointError, NoTarget: what is wrong, and the fix.
    """
    opened = open_files(config)
    plan = opened.plan(0, resolve)

    def load(progress: ReportProgress | None) -> Runner:
        if plan.place.layout.world_size > 1:
            return Ranks(config, plan.place.layout, rank_main=rank_main, progress=progress)
        group = SingleGroup()
        weights = load_weights(opened, plan, progress)
        return start_rank(opened, plan, weights, Groups(group, group))

    model = opened.model
    limit = model.max_position_embeddings
    return OpenModel(opened.tokenizer, model.vocab_size, limit, load, opened.max_drafts)


def load_weights(opened: Opened, plan: Plan, progress: ReportProgress | None) -> ModelWeights:
    """The weights of one rank, in the form that its program reads."""
    threads = _threads_for(plan.weight_bytes, opened.local_size)
    torch.set_num_threads(opened.config.num_threads or threads)
    config, place, packs = opened.config, plan.place, plan.packs()
    kind: dict[str, Any] = {"dtype": plan.dtype, "device": opened.device, "packs": packs}
    if config.load_format == "dummy":
        return dummy_model(place.model, place.layout, place.rank, **kind)
    checkpoint = Checkpoint.open(config.model)
    return load_model(checkpoint, place.model, place.layout, place.rank, progress=progress, **kind)


def start_rank(opened: Opened, plan: Plan, weights: ModelWeights, groups: Groups) -> ModelRunner:
    """A rank that runs steps, with caches; collective."""
    config, device, tokenizer = opened.config, opened.device, opened.tokenizer
    sizes = CacheSizes(
        num_pages=config.cache_tokens // config.page_size + 1,
        page_size=config.page_size,
        num_slots=config.max_running + 1,
        max_draft=opened.max_drafts,
    )
    unwritten = range(tokenizer.vocab_size, opened.model.vocab_size)
    program = plan.program(weights, groups)
    forced = config.forced_acceptance
    buffer, drafts = start_drafter(opened, plan, program, sizes)
    return ModelRunner(
        program,
        create_cache(plan.place, groups.world, sizes=sizes, dtype=plan.dtype, device=device),
        Sampler(
            groups.tp,
            tokenizer.illegal_ids.union(unwritten),
            device,
            rule=config.acceptance,
            forced=None if forced is None else ForcedAcceptance(forced),
        ),
        limits=plan.route.row.limits,
        page_size=config.page_size,
        device=device,
        tap_buffer=buffer,
        drafts=drafts,
    )


def start_drafter(
    opened: Opened, plan: Plan, program: Program, sizes: CacheSizes
) -> tuple[TapBuffer | None, DraftRunner | None]:
    """What a rank needs to draft: every stage captures taps, the last one drafts."""
    c, drafter, place = opened.config, opened.drafter, plan.place
    if drafter is None or c.drafter is None:
        return None, None
    norm = program.weights.layers[0].input_norm
    tokens = max(c.max_step_tokens, plan.route.row.limits.decode_max_tokens)
    buffer = TapBuffer(drafter.taps, drafter.tap_stream, tokens, norm)
    if not place.is_last_stage:
        return buffer, None
    target = Checkpoint.open(c.model)
    trained_for = drafter.target_fingerprint
    if trained_for is not None and trained_for != fingerprint(target):
        _LOG.warning(
            "drafter %s was trained for another checkpoint than %s; it may guess badly",
            c.drafter,
            c.model,
        )
    kind: dict[str, Any] = {"dtype": plan.dtype, "device": opened.device}
    embed = _whole_embedding(target, program.weights, place, plan.dtype, opened.device)
    weights = load_drafter(
        Checkpoint.open(c.drafter),
        drafter,
        place.layout,
        place.rank % place.layout.tp,
        embed=embed,
        **kind,
    )
    head = program.weights.head
    assert head is not None, "the last stage holds the head"
    chosen = create_drafter(
        DrafterPlan(
            row=plan.route.row,
            arch=arch_of(opened.device) or Arch.CPU,
            config=drafter,
            weights=weights,
            embed=embed,
            head=head,
            group=program.groups.tp,
            counts=program.counts,
        )
    )
    runner = DraftRunner(
        chosen,
        create_drafter_cache(drafter, place.layout, sizes=sizes, **kind),
        max_drafts=opened.max_drafts,
        num_slots=sizes.num_slots,
        vocab_size=drafter.vocab_size // place.layout.tp,
        keeps_logits=c.acceptance != "match",
        device=opened.device,
    )
    return buffer, runner


def _whole_embedding(
    target: Checkpoint, weights: ModelWeights, place: Rank, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The target's table, which ranks of larger layouts hold a part of, or none."""
    if place.layout.world_size == 1 and weights.embed is not None:
        return weights.embed
    (name,) = (name for name in target.tensors if name.endswith("embed_tokens.weight"))
    return target.reader().tensor(name).to(dtype).to(device)


def _threads_for(weight_bytes: int, local_size: int) -> int:
    """Threads that have enough to do to be worth waiting for, which on a busy machine is long."""
    return max(1, min(weight_bytes // BYTES_PER_THREAD, (os.cpu_count() or 1) // local_size))
