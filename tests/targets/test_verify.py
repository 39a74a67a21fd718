"""Verify steps with drafts: whatever is accepted, the next step continues as plain decoding."""

import random

import pytest
import torch

from tests.targets.models import FAMILIES, Session, expected, relative_error, tokens

DRAFTS = 3


@pytest.mark.parametrize("family", FAMILIES)
def test_any_acceptance_equals_plain_decoding(family):
    """Each step feeds one sure token and three drafts, of which a random prefix is right."""
    text, chance = tokens(30, 6, family), random.Random(0)
    wanted = expected(family, text)
    session = Session(family, max_draft=DRAFTS)
    session.step({"a": text[:4]})
    position, pending = 4, 0
    while position + DRAFTS < len(text):
        right = chance.randint(0, DRAFTS)
        wrong = [(token + 1) % 100 for token in text[position + 1 + right : position + 1 + DRAFTS]]
        fed = [*text[position : position + 1 + right], *wrong]
        logits = session.step(decode={"a": fed}, pending={"a": pending}, accept={"a": 1 + right})
        ours = logits[: 1 + right]
        assert relative_error(ours, wanted[position : position + 1 + right]) <= 1e-5
        position, pending = position + 1 + right, right


@pytest.mark.parametrize("family", FAMILIES)
def test_control_forgotten_drafts_are_seen(family):
    """Dropping the pending count loses the accepted drafts from the KDA state."""
    text = tokens(20, 7, family)
    session = Session(family, max_draft=DRAFTS)
    session.step({"a": text[:4]})
    session.step(decode={"a": text[4:8]}, accept={"a": 4})
    logits = session.step(decode={"a": text[8:12]}, pending={"a": 0})
    assert relative_error(logits, expected(family, text)[8:12]) > 1e-3


def test_rows_of_different_acceptance_share_a_step():
    texts = {name: tokens(16, 20 + i, "kimi_k3") for i, name in enumerate("ab")}
    session = Session("kimi_k3", max_draft=DRAFTS)
    session.step({name: text[:4] for name, text in texts.items()})
    feed = {"a": texts["a"][4:8], "b": [texts["b"][4], 1, 2, 3]}
    session.step(decode=feed, accept={"a": 4, "b": 1})
    feed = {"a": texts["a"][8:12], "b": texts["b"][5:9]}
    logits = session.step(decode=feed, pending={"a": 3, "b": 0})
    wanted = torch.cat(
        [expected("kimi_k3", texts["a"])[8:12], expected("kimi_k3", texts["b"])[5:9]]
    )
    assert relative_error(logits, wanted) <= 1e-5
