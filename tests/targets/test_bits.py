"""Sums have one order: a layout's logits are one rank's, bit for bit, in fp32.

`sum_layout` makes a rank add up as the ranks of a finer layout do; see docs/numerics.md.
"""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tercel.core import sums
from tercel.core.layout import Layout
from tercel.errors import ConfigError
from tercel.parallel import exchange
from tercel.parallel.distributed import DistributedGroup
from tests.targets.layouts import LAYOUTS, checkpoint16, on_every_rank, start_rank, whole
from tests.targets.models import FAMILIES, resolved, tokens


def steps(session):
    """Chunks of a prompt, a mixed step, decode steps: the logits of each."""
    first, second = tokens(13, 0, session.family), tokens(9, 1, session.family)
    plans = [
        ({"a": first[:9]}, None),
        ({"b": second[:4], "a": first[9:11]}, None),
        ({"b": second[4:7]}, {"a": [first[11]]}),
        (None, {"a": [first[12]], "b": [second[7]]}),
        (None, {"b": [second[8]]}),
    ]
    logits = [whole(session, session.step(*plan)) for plan in plans]
    return None if logits[0] is None else torch.cat(logits)


def logits(family, layout, sum_layout):
    model = checkpoint16(family)
    return on_every_rank(model, layout, steps, mode="off", sum_layout=sum_layout)[-1]


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_equals_one_rank(family, layout):
    order = layout.removesuffix("_pp2")
    assert torch.equal(logits(family, layout, order), logits(family, "tp1", order))


@pytest.mark.parametrize(
    ("order", "layouts"),
    [
        ("tp16_moetp16ep1", ("tp1", "tp2", "tp4", "tp8_pp2", "tp16_moetp16ep1")),
        ("tp16_moetp4ep4", ("tp1", "tp4", "tp16_moetp4ep4")),
    ],
)
def test_one_order_serves_many_layouts(order, layouts):
    expected, *others = (logits("kimi_k3", layout, order) for layout in layouts)
    assert all(torch.equal(other, expected) for other in others)


def test_control_another_order_differs(monkeypatch):
    """The limit is not so wide that any order would pass: the ranks' parts added backwards, and the
    order of one rank alone, both differ."""
    expected = logits("kimi_k3", "tp1", "tp4")
    assert not torch.equal(logits("kimi_k3", "tp1", None), expected)
    forwards = sums.rank_ordered_sum
    monkeypatch.setattr(exchange, "rank_ordered_sum", lambda parts: forwards(parts[::-1]))
    backwards = logits("kimi_k3", "tp4", "tp4")
    assert not torch.equal(backwards, expected)
    torch.testing.assert_close(backwards, expected, rtol=1e-4, atol=1e-4)


def _process(rank, world_size, family, layout, order, directory):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size
    )
    session = start_rank(family, layout, DistributedGroup(), mode="off", sum_layout=order)
    result = steps(session)
    if result is not None:
        torch.save(result, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_pp2", "tp16_moetp4ep4"])
def test_processes_equal_one_rank(layout, tmp_path):
    """The same over gloo, a process per rank."""
    model, order = checkpoint16("kimi_k3"), layout.removesuffix("_pp2")
    world_size = Layout.parse(layout).world_size
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.targets.test_bits"])
    ranks = [
        context.Process(
            target=_process, args=(rank, world_size, model, layout, order, str(tmp_path))
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    expected = logits("kimi_k3", "tp1", order)
    written = sorted(Path(tmp_path).glob("*.pt"))
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
