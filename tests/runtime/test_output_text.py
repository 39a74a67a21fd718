from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tercel.runtime.output_text import OutputText, StopStrings
from tercel.runtime.tokenizer import Tokenizer, byte_tokens

TOKENIZER = Tokenizer(byte_tokens())

texts = st.text("abc", max_size=20)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=3)


def first_stop(text, stops):
    """Where the text ends: the first stop string to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(texts, stop_lists, st.lists(st.integers(0, 20)))
def test_the_split_never_changes_the_text(text, stops, cuts):
    expected, stop = first_stop(text, stops)
    finder, emitted = StopStrings(stops), ""
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in pairwise(bounds):
        emitted += finder.push(text[start:end])
        assert expected.startswith(emitted)
    emitted += finder.flush()
    assert (emitted, finder.found) == (expected, stop)


@given(texts, stop_lists)
def test_only_what_may_begin_a_stop_string_is_held_back(text, stops):
    finder = StopStrings(stops)
    emitted = finder.push(text)
    if finder.found is None:
        held = text[len(emitted) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def push_all(output, text):
    return "".join(output.push(token) for token in TOKENIZER.encode(text))


def test_a_character_of_several_tokens():
    output = OutputText(TOKENIZER, ["ü!"], min_tokens=0)
    assert push_all(output, "aü") == "a"
    assert push_all(output, "?") == "ü?"
    assert output.push(TOKENIZER.encode("é")[0]) == ""
    assert output.finish() == "�"


def test_the_first_tokens_cannot_stop():
    output = OutputText(TOKENIZER, ["b"], min_tokens=2)
    assert push_all(output, "abab") == "aba"
    assert output.stopped_by == "b"
