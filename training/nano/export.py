"""Writes a trained model as a checkpoint in the published K3 format."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tercel.reference.kimi_k3 import Model
from tercel.reference.weights import FP32_PARAMETERS
from training.nano.mxfp4 import quantize

PREFIX = "language_model."
NUM_SHARDS = 2
A_LOG_ENTRIES = 128
"""A_log is zero-padded to this many entries, as in the published checkpoint."""


def export(model: Model, directory: Path) -> None:
    """Writes the shards and their index; the rest of the checkpoint does not depend on training."""
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{} for _ in range(NUM_SHARDS)]
    per_shard = model.config.num_hidden_layers / NUM_SHARDS
    for name, tensor in checkpoint_tensors(model):
        _, found, rest = name.partition(".layers.")
        shard = int(int(rest.split(".")[0]) / per_shard) if found else NUM_SHARDS - 1
        shards[shard][name] = tensor
    files = [f"model-{i + 1:05}-of-{NUM_SHARDS:06}.safetensors" for i in range(NUM_SHARDS)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, directory / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
        "weight_map": {
            name: file for file, shard in zip(files, shards, strict=True) for name in shard
        },
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=0))


def checkpoint_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Published names and tensors on the CPU: MXFP4 experts, fp32 where K3 keeps it, else bf16."""
    for name, parameter in model.named_parameters():
        value = parameter.detach().float().cpu()
        parent, _, leaf = name.rpartition(".")
        if leaf in ("w1", "w2", "w3"):
            packed, scale = quantize(value)
            for expert in range(len(value)):
                expert_name = f"{PREFIX}{parent}.{expert}.{leaf}"
                yield f"{expert_name}.weight_packed", packed[expert].clone()
                yield f"{expert_name}.weight_scale", scale[expert].clone()
        elif leaf == "A_log":
            padding = torch.zeros(A_LOG_ENTRIES - len(value))
            yield PREFIX + name, torch.cat([value, padding])
        else:
            keeps_fp32 = name.endswith(FP32_PARAMETERS)
            yield PREFIX + name, value if keeps_fp32 else value.bfloat16()
