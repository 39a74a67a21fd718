"""From a checkpoint to the weights of one rank: row by row, slice by slice, one shard at a time."""

import torch

from tercel.core import parameters
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.parameters import ModelWeights
from tercel.errors import ConfigError
from tercel.weights.build import Build, Packs, Progress, check_packs
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.manifest import account, checkpoint_table
from tercel.weights.problems import raise_problems
from tercel.weights.quantization import COMPRESSED
from tercel.weights.rows import Node
from tercel.weights.table import KIMI_K3, model_table


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packs: Packs | None = None,
    progress: Progress | None = None,
) -> ModelWeights:
    """The weights of `rank`, tensors that the checkpoint keeps in fp32 aside in `dtype`.

    Beyond the weights, memory holds one layer's tensors before packing and the pages of one shard.

    Raises:
        CheckpointError: lists everything that is wrong with the checkpoint, and nothing is loaded
            then; or names the file that changed during the load.
        ConfigError: the layout does not divide the model, or a pack names no field.
    """
    build = _build(config, layout, rank, dtype, device, packs)
    _, problems = account(checkpoint, config)
    raise_problems(checkpoint.path, problems, _quantization_hint(config))
    layers = layout.stage_layers(rank, config.num_hidden_layers)
    table = checkpoint_table(checkpoint, config, layers)
    weights: ModelWeights = build.model(table, build.load(table, checkpoint, progress))
    return weights


def dummy_model(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    packs: Packs | None = None,
) -> ModelWeights:
    """Random weights of the shapes, dtypes and expert format that the config declares."""
    build = _build(config, layout, rank, dtype, device, packs)
    weights: ModelWeights = build.model(_declared_table(config, layout, rank), build.draw(seed))
    return weights


def meta_model(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype,
    packs: Packs | None = None,
) -> ModelWeights:
    """The same shapes and dtypes without memory, for recording what a rank runs."""
    build = _build(config, layout, rank, dtype, torch.device("meta"), packs)
    table = _declared_table(config, layout, rank)
    weights: ModelWeights = build.model(table, lambda tensors, rows: None)
    return weights


def _build(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    packs: Packs | None,
) -> Build:
    layout.check(config)
    check_packs(packs or {}, parameters)
    return Build(layout, rank, dtype, device, packs or {})


def _declared_table(config: ModelConfig, layout: Layout, rank: int) -> Node:
    formats = {None: "plain", "compressed-tensors": "mxfp4", "modelopt_mixed": "nvfp4"}
    if config.quant_method not in formats:
        known = " or ".join(name for name in formats if name)
        raise ConfigError(f"quant_method={config.quant_method!r} is not supported; use {known}")
    if config.quant_format not in (None, *COMPRESSED):
        raise ConfigError(
            f"quantization_config.format={config.quant_format!r} is not supported; "
            f"use {' or '.join(COMPRESSED)}"
        )
    layers = layout.stage_layers(rank, config.num_hidden_layers)
    return model_table(config, KIMI_K3, lambda key: formats[config.quant_method], layers)


def _quantization_hint(config: ModelConfig) -> str:
    if config.quant_method is None:
        return ""
    return (
        f"config.json declares quant_method {config.quant_method!r}; experts are read as MXFP4 "
        "(weight_packed, weight_scale), NVFP4 (u8 weight, weight_scale, weight_scale_2), FP8 in "
        "blocks (e4m3 weight, weight_scale) or plain weights"
    )
