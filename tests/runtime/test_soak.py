"""The judge of a soak's divergences."""

import pytest

from tercel.config import SamplingParams
from tests.runtime.soak import disturbed_logits, nano_texts, share_near

REQUEST = ([40, 50, 60], SamplingParams(temperature=1.0, seed=3, max_tokens=6))


@pytest.fixture(scope="module", params=["match", "block"])
def rule(request):
    return request.param


@pytest.fixture(scope="module")
def alone(rule):
    return nano_texts({"a": REQUEST}, rule)["a"]


def test_what_no_rounding_explains_is_found(rule, alone):
    wrong = [*alone[:3], (alone[3] + 1) % 100, *alone[4:]]
    assert share_near(REQUEST, wrong, alone, rule, tries=3) == 0


def test_what_a_disturbance_explains_is_near(rule, alone):
    """Logits that are off by much give another text, and that text is near by this much."""
    with disturbed_logits(5.0):
        other = next(iter(nano_texts({"a": REQUEST}, rule, max_running=1).values()))
    assert other != alone
    assert share_near(REQUEST, other, alone, rule, size=5.0, tries=2) > 0
    assert share_near(REQUEST, other, alone, rule, tries=3) == 0
