"""From a configuration to a program that runs: route, bind, record, prove, load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tercel.config import EngineConfig
from tercel.core.arch import Arch
from tercel.core.cache import ModelCache
from tercel.core.group import Groups
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.parameters import ModelWeights, tensors_of
from tercel.core.rank import Rank
from tercel.core.step import StepClass
from tercel.errors import ConfigError, NoTarget
from tercel.parallel import SingleGroup
from tercel.targets.binding import SAMPLING, Binding, Bound, bind, bind_sites, packs
from tercel.targets.launch_order import ReadTooEarly
from tercel.targets.program import (
    Program,
    certified_fraction,
    digest,
    prove_decode_reads_nothing,
    record,
)
from tercel.targets.recording import Call, Refused
from tercel.targets.routing import Question, Route, route
from tercel.targets.state import CacheSizes, create_cache
from tercel.weights.load import meta_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """A target resolved for one rank, before any weight is read."""

    route: Route
    binding: Binding
    place: Rank
    dtype: torch.dtype
    calls: Mapping[StepClass, tuple[Call, ...]]
    digest: str
    """What ranks compare before they load."""
    weight_bytes: int
    """This rank's weights, packed."""
    sampling: Mapping[str, Bound]
    """What turns logits into tokens and reports, by site of SAMPLING."""

    @property
    def certified(self) -> float:
        """Share of the decode step's op calls that are certified on this architecture."""
        return certified_fraction(self.calls[StepClass.DECODE])

    def program(self, weights: ModelWeights, groups: Groups) -> Program:
        return Program(self.route.row, self.binding, weights, groups, self.place)

    def packs(self) -> dict[str, Callable[[Any], Any]]:
        return packs(self.binding, self.dtype)


def device_of(config: EngineConfig) -> torch.device:
    """The device that `config` asks for; ConfigError where there is none."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"device={config.device!r}: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={config.device!r}: no CUDA device is visible; use device=cpu")
    return device


def dtype_of(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The activation dtype: what was asked for, else fp32 on a CPU and bf16 on a GPU."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def resolve(
    model: ModelConfig,
    config: EngineConfig,
    *,
    arch: Arch | None,
    dtype: torch.dtype,
    rank: int = 0,
) -> Plan:
    """Chooses the target, binds its sites, and runs its recipe on meta tensors: every call is
    checked against its contract, and decode steps are proven free of host reads. A kernel that does
    not serve the model's sizes gives way to the next, and what its place among the launches keeps
    from reading early waits."""
    layout = Layout.parse(config.layout)
    layout.check(model)
    routed = route(Question(model, config, layout, arch))
    sums = None if config.sum_layout is None else Layout.parse(config.sum_layout)
    if sums is not None:
        sums.check(model)
        layout.check_sums(sums)
    place = Rank(layout, rank, model, sums)
    cache = meta_cache(place, config.page_size, dtype, config.kv_dtype)
    refused: dict[tuple[str, str, str], str] = {}
    late: set[tuple[str, str]] = set()
    while True:
        binding = bind(
            routed.row, arch or Arch.CPU, ordered=sums is not None, refused=refused, late=late
        )
        weights = meta_model(model, layout, rank, dtype=dtype, packs=packs(binding, dtype))
        resolved = (routed.row, binding, weights, cache, place, config.page_size)
        try:
            calls = record(*resolved)
            break
        except Refused as refusal:
            if routed.row.policy != "best" or refusal.key in refused:
                raise
            refused[refusal.key] = refusal.reason
        except ReadTooEarly as refusal:
            if not refusal.when or (refusal.site, refusal.when) in late:
                raise
            late.add((refusal.site, refusal.when))
    if config.mode == "require":
        _check_certified(routed, calls[StepClass.DECODE])
    prove_decode_reads_nothing(*resolved)
    weight_bytes = sum(tensor.nbytes for tensor in tensors_of(weights))
    sampling = bind_sites(routed.row, arch or Arch.CPU, SAMPLING, ordered=sums is not None)
    program = digest(routed.row, calls)
    return Plan(routed, binding, place, dtype, calls, program, weight_bytes, sampling)


def _check_certified(routed: Route, decode: tuple[Call, ...]) -> None:
    """Raises NoTarget for a named target whose decode steps would run portable sites."""
    names = {call.site for call in decode if call.implementation in ("portable", "reference")}
    if names:
        raise NoTarget(
            f"mode=require: target {routed.row.name} would decode on portable implementations "
            f"at {', '.join(sorted(names))}; certify kernels for them, or use mode=auto\n"
            f"{routed.trace}"
        )


def meta_cache(
    place: Rank, page_size: int, dtype: torch.dtype, kv_dtype: str = "auto"
) -> ModelCache:
    """Caches of a few pages and slots without memory, for recording."""
    return create_cache(
        place,
        SingleGroup(),
        sizes=CacheSizes(num_pages=4, page_size=page_size, num_slots=4),
        dtype=dtype,
        device=torch.device("meta"),
        kv_dtype=kv_dtype,
    )
