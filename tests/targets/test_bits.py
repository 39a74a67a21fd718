"""Sums have one order: a layout's logits are one rank's, bit for bit, in fp32.

`sum_layout` makes a rank add up as the ranks of a finer layout do; see docs/numerics.md.
"""

import multiprocessing
import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tercel.core import sums
from tercel.core.layout import Layout
from tercel.errors import ConfigError
from tercel.parallel import exchange
from tercel.parallel.distributed import DistributedGroup
from tests.targets.layouts import LAYOUTS, checkpoint16, on_every_rank, plan_of, start_rank, whole
from tests.targets.models import resolved, tokens


def steps(session):
    """Chunks of two prompts, a mixed step, a decode step: the logits of each."""
    first, second = tokens(11, 0, session.family), tokens(8, 1, session.family)
    plans = [
        ({"a": first[:9], "b": second[:4]}, None),
        ({"b": second[4:7]}, {"a": [first[9]]}),
        (None, {"a": [first[10]], "b": [second[7]]}),
    ]
    logits = [whole(session, session.step(*plan)) for plan in plans]
    return None if logits[0] is None else torch.cat(logits)


@cache
def logits(family, layout, sum_layout):
    model = checkpoint16(family)
    return on_every_rank(model, layout, steps, mode="off", sum_layout=sum_layout)[-1]


ORDERS = [
    ("kimi_k3", "tp16_moetp16ep1", ["tp1", "tp2", "tp4", "tp8_pp2", "tp16_moetp16ep1"]),
    ("kimi_k3", "tp16_moetp4ep4", ["tp1", "tp4", "tp16_moetp4ep4"]),
    ("kimi_linear", "tp4_moetp2ep2", ["tp1", "tp4_moetp2ep2"]),
    ("kimi_linear", "tp4", ["tp1", "tp2_pp2"]),
]
"""Orders of the sums, and layouts that they refine."""


@pytest.mark.parametrize(("family", "order", "layouts"), ORDERS, ids=str)
def test_every_layout_equals_one_rank(family, order, layouts):
    expected, *others = (logits(family, layout, order) for layout in layouts)
    assert all(torch.equal(other, expected) for other in others)


def test_the_orders_reach_every_layout():
    assert {layout for *_, layouts in ORDERS for layout in layouts} >= set(LAYOUTS)


def test_the_order_of_a_layout_is_its_own_sums():
    """Coarser orders too: what two ranks add up, one rank can."""
    assert torch.equal(logits("kimi_k3", "tp2", "tp2"), logits("kimi_k3", "tp1", "tp2"))


def test_control_another_order_differs(monkeypatch):
    """The limit is not so wide that any order would pass: the ranks' parts added backwards, and the
    order of one rank alone, both differ."""
    expected = logits("kimi_k3", "tp1", "tp4")
    assert not torch.equal(logits("kimi_k3", "tp1", None), expected)
    forwards = sums.rank_ordered_sum
    monkeypatch.setattr(exchange, "rank_ordered_sum", lambda parts: forwards(parts[::-1]))
    backwards = logits.__wrapped__("kimi_k3", "tp4", "tp4")
    assert not torch.equal(backwards, expected)
    torch.testing.assert_close(backwards, expected, rtol=1e-4, atol=1e-4)


ON_PROCESSES = {"tp2_pp2": "tp2", "tp16_moetp4ep4": "tp16_moetp4ep4"}
"""Layouts, each with the order of its sums."""


def _rank(rank, family, layout, directory):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=Layout.parse(layout).world_size,
    )
    order = ON_PROCESSES[layout]
    session = start_rank(family, layout, DistributedGroup(), mode="off", sum_layout=order)
    result = steps(session)
    if result is not None:
        torch.save(result, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def _host(family, directory):
    """A process that has imported and resolved everything, and becomes every rank."""
    torch.set_num_threads(1)
    fork, failed = multiprocessing.get_context("fork"), False
    for layout, order in ON_PROCESSES.items():
        parsed = Layout.parse(layout)
        for stage in range(parsed.pp):
            plan_of(family, parsed, stage, mode="off", sum_layout=order)
        ranks = [
            fork.Process(target=_rank, args=(rank, family, layout, f"{directory}/{layout}"))
            for rank in range(parsed.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        failed |= any(process.exitcode for process in ranks)
    sys.exit(failed)


@pytest.mark.slow
def test_processes_equal_one_rank(tmp_path):
    """The same over gloo, a process per rank."""
    model = checkpoint16("kimi_k3")
    for layout in ON_PROCESSES:
        (tmp_path / layout).mkdir()
    host = multiprocessing.get_context("spawn").Process(target=_host, args=(model, str(tmp_path)))
    host.start()
    host.join(240)
    assert host.exitcode == 0
    for layout, order in ON_PROCESSES.items():
        expected = logits("kimi_k3", "tp1", order)
        written = sorted((tmp_path / layout).glob("*.pt"))
        assert len(written) == Layout.parse(layout).tp
        assert all(torch.equal(torch.load(file), expected) for file in written)


@pytest.mark.parametrize(
    ("layout", "order", "message"),
    [
        ("tp8", "tp16_moetp4ep4", "its ranks do not divide those of layout tp8"),
        ("tp4", "tp2", "do not divide"),
        ("tp2", "tp4_pp2", "do not divide"),
        ("tp1", "tp3", "does not divide by tp 3"),
    ],
)
def test_orders_that_do_not_fit(layout, order, message):
    with pytest.raises(ConfigError, match=message):
        resolved(checkpoint16("kimi_k3"), layout=layout, mode="off", sum_layout=order)


def test_an_order_wants_plain_implementations():
    with pytest.raises(ConfigError, match="set mode=off"):
        resolved(checkpoint16("kimi_k3"), layout="tp2", sum_layout="tp2")
