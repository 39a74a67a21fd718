"""The portable target against the reference: prefill, chunks, decode and mixed batches."""

import pytest
import torch

from tests.targets.models import FAMILIES, Session, expected, relative_error, tokens

LIMIT = 1e-5
LENGTH = 21


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def test_prefill(family):
    text = tokens(LENGTH, 0, family)
    logits = Session(family).step({"a": text})
    assert relative_error(logits[0], expected(family, text)[-1]) <= LIMIT


def test_prefill_in_two_chunks_at_every_split(family):
    text = tokens(LENGTH, 1, family)
    wanted = expected(family, text)
    for split in range(1, LENGTH):
        session = Session(family)
        first = session.step({"a": text[:split]})
        last = session.step({"a": text[split:]})
        assert relative_error(first[0], wanted[split - 1]) <= LIMIT, split
        assert relative_error(last[0], wanted[-1]) <= LIMIT, split


def test_decode(family):
    text = tokens(LENGTH, 2, family)
    wanted = expected(family, text)
    session = Session(family)
    session.step({"a": text[:5]})
    logits = torch.stack([session.step(decode={"a": [token]})[0] for token in text[5:]])
    assert relative_error(logits, wanted[5:]) <= LIMIT


def test_decode_from_the_first_token(family):
    text = tokens(7, 3, family)
    session = Session(family)
    session.step({"a": text[:1]})
    logits = torch.stack([session.step(decode={"a": [token]})[0] for token in text[1:]])
    assert relative_error(logits, expected(family, text)[1:]) <= LIMIT


def test_mixed_batches(family):
    """Three requests of different ages share steps; none notices the others."""
    texts = {name: tokens(LENGTH, 10 + i, family) for i, name in enumerate("abc")}
    wanted = {name: expected(family, text) for name, text in texts.items()}
    session = Session(family)
    session.step({"a": texts["a"][:4], "b": texts["b"][:9]})
    mixed = session.step({"c": texts["c"][:6]}, {"a": [texts["a"][4]], "b": [texts["b"][9]]})
    assert relative_error(mixed[0], wanted["c"][5]) <= LIMIT
    assert relative_error(mixed[1], wanted["a"][4]) <= LIMIT
    assert relative_error(mixed[2], wanted["b"][9]) <= LIMIT
    chunk = session.step({"c": texts["c"][6:15]}, {"b": [texts["b"][10]], "a": [texts["a"][5]]})
    assert relative_error(chunk[0], wanted["c"][14]) <= LIMIT
    assert relative_error(chunk[2], wanted["a"][5]) <= LIMIT
    both = session.step(decode={"c": [texts["c"][15]], "b": [texts["b"][11]]})
    assert relative_error(both[1], wanted["b"][11]) <= LIMIT


def test_control_a_wrong_slot_is_seen(family):
    """The limit is tight enough to tell another request's state from one's own."""
    text = tokens(LENGTH, 4, family)
    session = Session(family)
    session.step({"a": text[:10], "b": tokens(10, 5, family)})
    session._slots["a"], session._slots["b"] = session._slots["b"], session._slots["a"]
    logits = session.step(decode={"a": [text[10]]})
    assert relative_error(logits[0], expected(family, text)[10]) > 100 * LIMIT
