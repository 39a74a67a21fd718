"""Ranks together give what one rank gives, and what the reference gives."""

import pytest
import torch

from tercel.blocks import pipeline
from tercel.core.drafting import Taps
from tests.targets.layouts import LAYOUTS, checkpoint16, on_every_rank, whole
from tests.targets.models import FAMILIES, expected, relative_error, tokens

LIMIT = 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_gives_the_reference(family, layout):
    """Chunks of a prompt, a mixed step and decode steps."""
    model = checkpoint16(family)
    first, second = tokens(12, 0, model), tokens(8, 1, model)

    def body(session):
        steps = [
            ({"a": first[:4]}, None),
            ({"a": first[4:10]}, None),
            ({"b": second[:7]}, {"a": [first[10]]}),
            (None, {"b": [second[7]], "a": [first[11]]}),
        ]
        return [whole(session, session.step(*step)) for step in steps]

    results = on_every_rank(model, layout, body)
    a, b = expected(model, first), expected(model, second)
    wanted = [a[3:4], a[9:10], [b[6], a[10]], [b[7], a[11]]]
    last_stage = [steps for steps in results if steps[0] is not None]
    for logits, reference in zip(last_stage[0], wanted, strict=True):
        reference = torch.stack(list(reference))
        assert relative_error(logits, reference) <= LIMIT
    for steps in last_stage[1:]:
        assert all(map(torch.equal, steps, last_stage[0]))


@pytest.mark.parametrize("layout", ["tp1_pp2", "tp2_pp3", "tp1_pp5"])
@pytest.mark.parametrize("family", FAMILIES)
def test_uneven_stages_hand_over_snapshots_and_taps(family, layout):
    """Stages that begin with a snapshot, right after one, and with taps of both neighbours."""
    model, layers = checkpoint16(family), (0, 1, 2, 3)
    text = tokens(11, 2, model)

    def body(session):
        rows = torch.full((len(layers), len(text), 64), torch.nan)
        session.taps = Taps(layers, rows)
        return whole(session, session.step({"a": text})), rows

    (alone, taps), *_ = on_every_rank(model, "tp1", body)
    assert taps.isfinite().all()
    *_, (logits, gathered) = on_every_rank(model, layout, body)
    assert relative_error(logits, alone.double()) <= LIMIT
    assert relative_error(gathered, taps.double()) <= LIMIT


def test_control_a_stage_that_forgets_the_snapshots(monkeypatch):
    """Handing over the prefix sum alone is seen at once."""
    model, text = checkpoint16("kimi_k3"), tokens(11, 2, checkpoint16("kimi_k3"))
    receive = pipeline.receive

    def forgetful(world, place, bank, taps):
        prefix = receive(world, place, bank, taps)
        bank.zero_()
        return prefix

    monkeypatch.setattr(pipeline, "receive", forgetful)
    *_, logits = on_every_rank(model, "tp1_pp2", lambda session: session.step({"a": text}))
    assert relative_error(logits[0], expected(model, text)[-1]) > 100 * LIMIT
