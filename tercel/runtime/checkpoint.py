"""From a checkpoint directory to something that runs plans on this process's device."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercel.config import EngineConfig
from tercel.core.arch import arch_of
from tercel.core.drafter import DrafterConfig
from tercel.core.group import Groups
from tercel.core.model import ModelConfig
from tercel.core.parameters import ModelWeights
from tercel.errors import CheckpointError
from tercel.parallel import SingleGroup
from tercel.runtime.drafting import max_drafts_of, open_drafter, start_drafting
from tercel.runtime.fixed_inputs import StepSize
from tercel.runtime.forced import ForcedAcceptance
from tercel.runtime.graphs import Capture, CudaCapture, GraphRunner, step_sizes
from tercel.runtime.model_runner import ModelRunner
from tercel.runtime.proposals import drafts_per_request
from tercel.runtime.ranks import RANK_MAIN, Ranks
from tercel.runtime.runner import OpenModel, ReportProgress, Runner
from tercel.runtime.sampler import Sampler
from tercel.runtime.step_work import StepWork
from tercel.runtime.tokenizer import Tokenizer
from tercel.targets.binding import counted
from tercel.targets.load import Plan, device_of, dtype_of, resolve
from tercel.targets.state import CacheSizes, create_cache, create_counters
from tercel.weights.checkpoint import Checkpoint
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
        return max_drafts_of(self.config, self.drafter)

    def plan(self, rank: int, resolve: Callable[..., Plan] = resolve) -> Plan:
        """The program of a rank.

        Raises:
            ConfigError, NoTarget: what is wrong with the configuration, and the fix.
        """
        arch, dtype = arch_of(self.device), dtype_of(self.config, self.device)
        return resolve(self.model, self.config, arch=arch, dtype=dtype, rank=rank)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Of config.model; random weights do without its file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    is_dummy = config.load_format == "dummy"
    return Tokenizer.load_or_bytes(config.model) if is_dummy else Tokenizer.load(config.model)


def open_files(config: EngineConfig, *, local_rank: int = 0, local_size: int = 1) -> Opened:
    """Reads the configuration and the tokenizer of config.model, for one of the ranks of a host.

    Raises:
        ConfigError, CheckpointError: what is wrong, and the fix.
    """
    model_dir = Path(config.model)
    model = ModelConfig.load(model_dir)
    tokenizer = load_tokenizer(config)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{model_dir}: the tokenizer has {tokenizer.vocab_size} tokens and config.json a "
            f"vocab_size of {model.vocab_size}; one of them belongs to another model"
        )
    device = device_of(config)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank)
    return Opened(config, model, tokenizer, device, open_drafter(config, model), local_size)


def open_checkpoint(
    config: EngineConfig,
    *,
    resolve: Callable[..., Plan] = resolve,
    rank_main: str = RANK_MAIN,
    capture: Capture | None = None,
) -> OpenModel:
    """Reads configuration and tokenizer, and resolves the target; the weights come with `load`.

    Args:
        resolve: as tercel.targets.load.resolve; another one serves another plan, on one rank.
        rank_main: module:function that a process of a rank runs, where the layout has several.
        capture: what captures the decode steps of one rank; None: CUDA graphs, on a GPU.
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
        return start_rank(opened, plan, weights, Groups(group, group), capture)

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


def start_rank(
    opened: Opened,
    plan: Plan,
    weights: ModelWeights,
    groups: Groups,
    capture: Capture | None = None,
) -> ModelRunner:
    """A rank that runs steps, with caches; collective. `capture` as of open_checkpoint."""
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
    cache = create_cache(
        plan.place,
        groups.world,
        sizes=sizes,
        dtype=plan.dtype,
        device=device,
        kv_dtype=config.kv_dtype,
    )
    table = {site: counted(site, bound, program.counts) for site, bound in plan.sampling.items()}
    sampler = Sampler(
        groups.tp,
        tokenizer.illegal_ids.union(unwritten),
        device,
        sites=table,
        rule=config.acceptance,
        forced=None if forced is None else ForcedAcceptance(forced),
        counters=create_counters(config.max_running, opened.max_drafts, device),
    )
    drafting = None
    if opened.drafter is not None:
        drafting = start_drafting(config, opened.drafter, plan, program, sizes, device)
    work = StepWork(program, cache, sampler, drafting)
    return ModelRunner(
        work,
        limits=plan.route.row.limits,
        page_size=config.page_size,
        device=device,
        graphs=_graphs(opened, plan, work, capture),
    )


@torch.inference_mode()
def _graphs(
    opened: Opened, plan: Plan, work: StepWork, capture: Capture | None
) -> GraphRunner | None:
    """The decode steps, captured; None where they run op by op."""
    config = opened.config
    if capture is None and opened.device.type == "cuda":
        capture = CudaCapture(opened.device)
    if capture is None or not config.decode_graphs:
        return None
    if plan.place.layout.world_size > 1:
        _LOG.info("decode steps run op by op: graphs are built for one rank")
        return None
    where: dict[str, Any] = {"page_size": config.page_size, "device": opened.device}
    sizes = _graph_sizes(opened, plan)
    graphs = GraphRunner(work, sizes, capture=capture, **where)
    _LOG.info(
        "captured %d decode graphs in %.1f s; they hold %.0f MiB",
        len(graphs),
        graphs.seconds,
        capture.pool_bytes / 2**20,
    )
    return graphs


def _graph_sizes(opened: Opened, plan: Plan) -> list[StepSize]:
    """Of the decode steps that this engine may run."""
    config, most = opened.config, opened.max_drafts
    longest = config.max_model_len or min(opened.model.max_position_embeddings, config.cache_tokens)
    return step_sizes(
        config.max_running,
        -(-longest // config.page_size),
        plan.route.row.limits,
        guesses=lambda rows: drafts_per_request(rows, most, config.verify_tokens),
        drafts=opened.drafter is not None,
    )


def _threads_for(weight_bytes: int, local_size: int) -> int:
    """Threads that have enough to do to be worth waiting for, which on a busy machine is long."""
    return max(1, min(weight_bytes // BYTES_PER_THREAD, (os.cpu_count() or 1) // local_size))
