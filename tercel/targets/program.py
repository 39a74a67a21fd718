"""A target resolved for one rank: what it runs, printed, hashed and run."""

import hashlib
import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import msgspec
import torch

from tercel.blocks.sites import SiteTable
from tercel.core.cache import ModelCache
from tercel.core.drafting import Taps
from tercel.core.group import Groups
from tercel.core.inputs import StepInputs, build_inputs
from tercel.core.parameters import ModelWeights
from tercel.core.rank import Rank
from tercel.core.step import Row, StepClass, StepPlan
from tercel.targets.binding import Binding, counted_table
from tercel.targets.recording import Call, Recorder, RecordingGroup, running_table
from tercel.targets.table import TargetRow

Recipe = Callable[..., torch.Tensor | None]

RECORDED_PLANS: Mapping[StepClass, StepPlan] = {
    StepClass.PREFILL: StepPlan(prefill=(Row("a", (1,) * 5, 0, 1, (1,)),)),
    StepClass.DECODE: StepPlan(verify=(Row("a", (1,), 3, 1, (1,)), Row("b", (1,), 4, 2, (2,)))),
    StepClass.VERIFY: StepPlan(verify=(Row("a", (1,) * 3, 3, 1, (1,)),)),
    StepClass.MIXED: StepPlan(
        prefill=(Row("a", (1,) * 5, 0, 1, (1,)),), verify=(Row("b", (1,), 4, 2, (2,)),)
    ),
}
"""One small step per class: the ops of a program and their order do not depend on sizes."""


def load_recipe(row: TargetRow) -> Recipe:
    module = importlib.import_module(f"tercel.targets.recipes.{row.recipe}")
    return module.forward  # type: ignore[no-any-return]


@dataclass
class Program:
    """A row's recipe with its implementations and this rank's weights."""

    row: TargetRow
    binding: Binding
    weights: ModelWeights
    groups: Groups
    place: Rank
    counts: Counter[str] = field(default_factory=Counter)
    """Calls per site, op and implementation since the start."""

    def __post_init__(self) -> None:
        self._recipe = load_recipe(self.row)
        self._tables: dict[StepClass, SiteTable] = {
            step_class: counted_table(bound, self.counts)
            for step_class, bound in self.binding.items()
        }

    def run(
        self,
        inputs: StepInputs,
        cache: ModelCache,
        step_class: StepClass,
        taps: Taps | None = None,
    ) -> torch.Tensor | None:
        """Logits of the sampled rows [S, V / tp] fp32, None before the last pipeline stage; caches
        are updated in place, and so are `taps`."""
        table = self._tables[step_class]
        return self._recipe(table, self.weights, cache, inputs, self.groups, self.place, taps)


def record(
    row: TargetRow,
    binding: Binding,
    weights: ModelWeights,
    cache: ModelCache,
    place: Rank,
    page_size: int,
    plans: Mapping[StepClass, StepPlan] = RECORDED_PLANS,
) -> dict[StepClass, tuple[Call, ...]]:
    """The ops of every step class in `plans`, in order, from meta weights and caches. Every call is
    checked against its contract on the way."""
    recipe, calls = load_recipe(row), {}
    for step_class, plan in plans.items():
        if step_class == StepClass.VERIFY and not _has_drafts(cache):
            continue
        recorder = Recorder(dict(binding[step_class]))
        groups = Groups.of(RecordingGroup.of(place, recorder), place.layout)
        inputs = build_inputs(plan, page_size=page_size, device=torch.device("meta"))
        with recorder.order.watching():
            recipe(recorder.table, weights, cache, inputs, groups, place)
        calls[step_class] = tuple(recorder.calls)
    return calls


def prove_decode_reads_nothing(
    row: TargetRow,
    binding: Binding,
    weights: ModelWeights,
    cache: ModelCache,
    place: Rank,
    page_size: int,
) -> None:
    """Runs the bound decode implementations on meta tensors. Raises where one reads a tensor on
    the host or returns another shape than its contract says."""
    recorder = Recorder({})
    groups = Groups.of(RecordingGroup.of(place, recorder), place.layout)
    inputs = build_inputs(
        RECORDED_PLANS[StepClass.DECODE], page_size=page_size, device=torch.device("meta")
    )
    table = running_table(binding, StepClass.DECODE)
    load_recipe(row)(table, weights, cache, inputs, groups, place)


def digest(row: TargetRow, calls: Mapping[StepClass, tuple[Call, ...]]) -> str:
    """The hash that ranks compare before weights load; receipts' status is not part of it."""
    listed = {
        step_class.value: [{**asdict(call), "status": ""} for call in items]
        for step_class, items in sorted(calls.items())
    }
    text = msgspec.json.encode({"target": row.name, "recipe": row.recipe, "calls": listed})
    return hashlib.sha256(text).hexdigest()


def certified_fraction(calls: tuple[Call, ...]) -> float:
    """The share of op calls whose implementation is certified on this architecture."""
    ops = [call for call in calls if call.site != "exchange"]
    return sum(call.status == "certified" for call in ops) / max(len(ops), 1)


def _has_drafts(cache: ModelCache) -> bool:
    return any(layer.draft_k.shape[1] > 0 for layer in cache.kda.values())
