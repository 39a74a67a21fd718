"""The judge of a soak's divergences."""

import json

import pytest

from tercel.config import SamplingParams
from tests.runtime import soak
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


def test_a_text_that_ends_early_is_found(rule, alone):
    """What both have is alike, so the end is where they part."""
    assert share_near(REQUEST, alone[:-1], alone, rule, tries=2) == 0
    assert share_near(REQUEST, [*alone, 40], alone, rule, tries=2) == 0


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_soak_fails_by_what_no_rounding_explains(is_wrong, monkeypatch, capsys):
    def texts(requests):
        found = plain(requests)
        if is_wrong:
            name = next(name for name, tokens in found.items() if tokens)
            found[name] = [*found[name][:-1], found[name][-1] + 1]
            wrong.append(name)
        return found

    plain, wrong = soak.shadow_texts, []
    monkeypatch.setattr(soak, "shadow_texts", texts)
    with pytest.raises(SystemExit) as end:
        soak.main(["--steps", "40"])
    assert end.value.code == is_wrong
    assert json.loads(capsys.readouterr().out)["different"] == dict.fromkeys(wrong, 0.0)
