"""A plan is host integers; inputs are what the device sees of it; the class follows from both."""

from dataclasses import replace

import pytest
import torch

from tercel.core.inputs import build_inputs
from tercel.core.step import SINK, Row, StepClass, StepPlan, TokenLimits, classify
from tests.targets.models import Session, expected, relative_error, tokens

PREFILL = Row("p", (5, 6, 7), 6, 2, (4, 9), samples=False)
DECODE = Row("d", (8,), 3, 1, (7,))
LIMITS = TokenLimits(decode_max_tokens=4)


@pytest.mark.parametrize(
    ("plan", "step_class"),
    [
        (StepPlan(prefill=(PREFILL,)), StepClass.PREFILL),
        (StepPlan(verify=(DECODE,)), StepClass.DECODE),
        (StepPlan(verify=(Row("d", (8, 9), 3, 1, (7,)),)), StepClass.VERIFY),
        (StepPlan(prefill=(PREFILL,), verify=(DECODE,)), StepClass.MIXED),
        (StepPlan(verify=(DECODE,) * 4), StepClass.DECODE),
        (StepPlan(verify=(DECODE,) * 5), StepClass.MIXED),
    ],
)
def test_classes(plan, step_class):
    assert classify(plan, LIMITS) == step_class


def test_inputs_of_a_mixed_plan():
    last = Row("q", (1, 2), 0, 3, (5,))
    inputs = build_inputs(
        StepPlan(prefill=(PREFILL, last), verify=(replace(DECODE, pending=2),)),
        page_size=8,
        device=torch.device("cpu"),
    )
    assert inputs.tokens.tolist() == [5, 6, 7, 1, 2, 8]
    assert inputs.slot_mapping.tolist() == [38, 39, 72, 40, 41, 59]
    assert inputs.sample_rows.tolist() == [4, 5]
    assert inputs.prefill.cu_seqlens == (0, 3, 5)
    assert inputs.prefill.context_lens == (6, 0)
    assert inputs.prefill.block_table.tolist() == [[4, 9], [5, SINK]]
    assert inputs.verify.slots.tolist() == [1]
    assert inputs.verify.context_lens.tolist() == [3]
    assert inputs.verify.pending.tolist() == [2]


def test_slots_and_pages_are_inputs_not_constants():
    """The same step with its rows in another order gives the same logits in that order, as a
    replayed graph must."""
    texts = {name: tokens(9, i, "kimi_k3") for i, name in enumerate("ab")}
    session = Session("kimi_k3")
    session.step({name: text[:8] for name, text in texts.items()})
    logits = session.step(decode={name: [texts[name][8]] for name in "ba"})
    wanted = torch.stack([expected("kimi_k3", texts[name])[8] for name in "ba"])
    assert relative_error(logits, wanted) <= 1e-5


def test_padded_rows_change_nothing():
    text = tokens(9, 3, "kimi_k3")
    session = Session("kimi_k3")
    session.step({"a": text[:8]})
    plan = StepPlan(verify=(session.row("a", text[8:]),)).padded(4, 1, 8)
    before = {i: layer.recurrent.clone() for i, layer in session.cache.kda.items()}
    inputs = build_inputs(plan, page_size=8, device=torch.device("cpu"))
    with torch.inference_mode():
        logits = session.program.run(inputs, session.cache, StepClass.DECODE)
    assert relative_error(logits[0], expected("kimi_k3", text)[8]) <= 1e-5
    own = plan.verify[0].slot
    for index, layer in session.cache.kda.items():
        for slot in range(1, layer.recurrent.shape[0]):
            same = torch.equal(layer.recurrent[slot], before[index][slot])
            assert same == (slot != own)
