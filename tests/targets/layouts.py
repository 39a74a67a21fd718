"""Every layout at reduced size: one thread per rank, each with its own program and caches."""

import atexit
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from tercel.core.group import Group
from tercel.core.layout import Layout
from tercel.parallel import run_threads
from tercel.targets.load import Plan
from tercel.weights.tiny import tiny_config
from tercel.weights.write import write_random_checkpoint
from tests.targets.models import Session, load_program, resolved

LAYOUTS = ("tp1", "tp2", "tp4", "tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")
FOR_16_RANKS = {
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "linear_attn_config.num_heads": 16,
    "linear_attn_config.head_dim": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 32,
    "intermediate_size": 512,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 512,
}
"""Sixteen of everything that sixteen ranks divide, in groups of 32 where MXFP4 needs them. Two
pipeline stages get three and two layers."""
K3_FOR_16_RANKS = {"q_lora_rank": 32, "routed_expert_hidden_size": 64}


@cache
def checkpoint16(family: str) -> str:
    """A checkpoint that sixteen ranks divide, removed with the test session."""
    directory = Path(mkdtemp(prefix="tercel-tests-"))
    atexit.register(shutil.rmtree, directory)
    changes = {**FOR_16_RANKS, **(K3_FOR_16_RANKS if family == "kimi_k3" else {})}
    write_random_checkpoint(directory, tiny_config(family, 512, changes=changes))
    return str(directory)


def on_every_rank(
    family: str, layout: str, body: Callable[[Session], Any], **options: Any
) -> list[Any]:
    """body(session) of every rank, in rank order; `options` are those of `resolved`."""

    def run(world: Any) -> Any:
        torch.set_num_threads(1)
        return body(start_rank(family, layout, world, **options))

    parsed = Layout.parse(layout)
    for stage in range(parsed.pp):  # before the threads, which share what this caches
        plan_of(family, parsed, stage, **options)
    return run_threads(parsed.world_size, run)


def start_rank(family: str, layout: str, world: Group, **options: Any) -> Session:
    """One rank, loaded, with caches of its own."""
    parsed = Layout.parse(layout)
    plan = plan_of(family, parsed, world.rank // parsed.tp, **options)
    plan = replace(plan, place=replace(plan.place, rank=world.rank))
    return Session(family, program=load_program(plan, family, world))


def plan_of(family: str, layout: Layout, stage: int, **options: Any) -> Plan:
    """What all ranks of a stage run."""
    return resolved(family, layout=layout.name, rank=stage * layout.tp, **options)


def whole(session: Session, logits: torch.Tensor | None) -> torch.Tensor | None:
    """The logits of the whole vocabulary."""
    return None if logits is None else session.program.groups.tp.all_gather(logits, dim=-1)
