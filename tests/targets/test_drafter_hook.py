"""A target may own its drafter: its row names a module, whose `create` is called once."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tercel import LLM, SamplingParams
from tercel.runtime.checkpoint import open_checkpoint
from tercel.targets.drafters import block, create_drafter
from tercel.targets.load import resolve
from tercel.targets.table import NAMED, generic, portable

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
OPTIONS = {
    "device": "cpu",
    "page_size": 16,
    "cache_tokens": 512,
    "max_running": 1,
    "num_threads": 1,
}


def test_every_row_has_the_drafter_of_its_own_checkpoint_by_default():
    assert {row.drafter for row in (*NAMED, portable("tp1"), generic("tp1"))} == {"block"}


def test_a_row_that_names_another_module_gets_its_drafter_once(monkeypatch):
    calls = []
    own = ModuleType("tercel.targets.drafters.own")

    def create(plan):
        calls.append(plan)
        return block.create(plan)

    own.create = create
    monkeypatch.setitem(sys.modules, own.__name__, own)

    def with_own(*arguments, **options):
        plan = resolve(*arguments, **options)
        return replace(plan, route=replace(plan.route, row=replace(plan.route.row, drafter="own")))

    with LLM(
        CHECKPOINTS / "nano",
        drafter=str(CHECKPOINTS / "nano-dspark"),
        open_model=lambda config: open_checkpoint(config, resolve=with_own),
        **OPTIONS,
    ) as llm:
        llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    assert len(calls) == 1 and calls[0].config.max_drafts == 7


def test_an_unknown_module_is_an_error():
    class Plan:
        row = replace(generic("tp1"), drafter="missing")

    with pytest.raises(ModuleNotFoundError, match="missing"):
        create_drafter(Plan())
