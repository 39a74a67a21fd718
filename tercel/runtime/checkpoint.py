"""From a checkpoint directory to something that runs plans on this process's device."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from tercel.config import EngineConfig
from tercel.core.arch import arch_of
from tercel.core.group import Groups
from tercel.core.model import ModelConfig
from tercel.core.parameters import ModelWeights
from tercel.errors import CheckpointError, ConfigError
from tercel.parallel import SingleGroup
from tercel.runtime.model_runner import ModelRunner
from tercel.runtime.runner import OpenModel, ReportProgress
from tercel.runtime.sampler import Sampler
from tercel.runtime.tokenizer import Tokenizer
from tercel.targets.load import Plan, device_of, dtype_of, resolve
from tercel.targets.state import CacheSizes, create_cache
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.load import dummy_model, load_model

BYTES_PER_THREAD = 64 << 20


def open_checkpoint(config: EngineConfig, *, resolve: Callable[..., Plan] = resolve) -> OpenModel:
    """Reads configuration and tokenizer, and resolves the target; the weights come with `load`.

    Args:
        resolve: as tercel.targets.load.resolve; another one serves another plan.
    Raises:
        ConfigError, CheckpointError, NoTarget: what is wrong, and the fix.
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
    plan = resolve(model, config, arch=arch_of(device), dtype=dtype_of(config, device))
    if plan.place.layout.world_size > 1:
        raise ConfigError(
            f"layout={config.layout} needs {plan.place.layout.world_size} ranks; this engine runs "
            "one: use layout=tp1"
        )

    def load(progress: ReportProgress | None) -> ModelRunner:
        group = SingleGroup()
        return load_rank(config, plan, Groups(group, group), tokenizer, device, progress)

    return OpenModel(tokenizer, model.vocab_size, model.max_position_embeddings, load)


def load_rank(
    config: EngineConfig,
    plan: Plan,
    groups: Groups,
    tokenizer: Tokenizer,
    device: torch.device,
    progress: ReportProgress | None,
) -> ModelRunner:
    """Reads the weights of one rank and creates its caches; collective."""
    torch.set_num_threads(config.num_threads or _threads_for(plan.weight_bytes))
    model = plan.place.model
    sizes = CacheSizes(
        num_pages=config.cache_tokens // config.page_size + 1,
        page_size=config.page_size,
        num_slots=config.max_running + 1,
    )
    unwritten = range(tokenizer.vocab_size, model.vocab_size)
    return ModelRunner(
        plan.program(_weights(config, plan, device, progress), groups),
        create_cache(plan.place, groups.world, sizes=sizes, dtype=plan.dtype, device=device),
        Sampler(groups.tp, tokenizer.illegal_ids.union(unwritten), device),
        limits=plan.route.row.limits,
        page_size=config.page_size,
        device=device,
    )


def _threads_for(weight_bytes: int) -> int:
    """Threads that have enough to do to be worth waiting for, which on a busy machine is long."""
    return max(1, min(weight_bytes // BYTES_PER_THREAD, os.cpu_count() or 1))


def _weights(
    config: EngineConfig, plan: Plan, device: torch.device, progress: ReportProgress | None
) -> ModelWeights:
    place, dtype, packs = plan.place, plan.dtype, plan.packs()
    if config.load_format == "dummy":
        return dummy_model(
            place.model, place.layout, place.rank, dtype=dtype, device=device, packs=packs
        )
    return load_model(
        Checkpoint.open(config.model),
        place.model,
        place.layout,
        place.rank,
        dtype=dtype,
        device=device,
        packs=packs,
        progress=progress,
    )
