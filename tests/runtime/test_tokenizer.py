import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercel.errors import CheckpointError, RequestError
from tercel.runtime.tokenizer import (
    PATTERN,
    RANK_FILE,
    Detokenizer,
    Tokenizer,
    byte_tokens,
    write_rank_file,
)

TOKENIZER = Tokenizer(byte_tokens())
BASE = TOKENIZER.num_base_tokens


def test_special_slots_sit_at_fixed_offsets_above_the_ranks():
    offsets = {
        "[BOS]": 0,
        "[EOS]": 1,
        "<|end_of_msg|>": 2,
        "<|open|>": 3,
        "<|close|>": 4,
        "<|sep|>": 5,
        "[start_header_id]": 6,
        "[end_header_id]": 7,
        f"<|reserved_token_{BASE + 8}|>": 8,
        "[EOT]": 9,
        "<|media_begin|>": 18,
        "<|media_content|>": 19,
        "<|media_end|>": 20,
        "<|media_pad|>": 21,
        "<osagent_mode>": 65,
        "[UNK]": 254,
        "[PAD]": 255,
    }
    assert {name: TOKENIZER.encode_special(name) - BASE for name in offsets} == offsets
    assert TOKENIZER.vocab_size == BASE + 256
    assert (TOKENIZER.bos_id, TOKENIZER.unk_id, TOKENIZER.pad_id) == (BASE, BASE + 254, BASE + 255)
    assert TOKENIZER.eos_id == BASE + 2


def test_a_model_may_sample_only_stops_and_markers_above_the_ranks():
    legal = set(range(BASE, BASE + 256)) - TOKENIZER.illegal_ids
    assert legal == {BASE + offset for offset in (1, 2, 3, 4, 5)}
    assert {BASE + 1, BASE + 2} == TOKENIZER.stop_ids


@pytest.mark.parametrize("name", ["<|open|>", "[EOS]", "<|end_of_msg|>", "<osagent_mode>"])
def test_special_names_in_text_stay_text(name):
    ids = TOKENIZER.encode(f"a {name} b")
    assert max(ids) < BASE
    assert TOKENIZER.decode(ids) == f"a {name} b"
    assert TOKENIZER.decode([TOKENIZER.encode_special(name)]) == name


def test_unknown_special_name_is_refused():
    with pytest.raises(RequestError, match="<think>"):
        TOKENIZER.encode_special("<think>")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("汉字Abc", ["汉字", "Abc"]),
        ("don't STOP", ["don't", " STOP"]),
        ("camelCase", ["camel", "Case"]),
        ("12345", ["123", "45"]),
        (" !?\n\nx", [" !?\n\n", "x"]),
        ("a \n b", ["a", " \n", " b"]),
        ("a   b  ", ["a", "  ", " b", "  "]),
    ],
)
def test_split_pattern(text, pieces):
    """One base token per piece, so that the ids show where the pattern cuts."""
    merged = {piece[:end] for piece in map(str.encode, pieces) for end in range(2, len(piece) + 1)}
    tokens = [bytes([byte]) for byte in range(256)] + sorted(merged, key=lambda t: (len(t), t))
    ids = Tokenizer(tokens).encode(text)
    assert [tokens[token_id].decode() for token_id in ids] == pieces


def test_pattern_has_eight_alternatives():
    assert PATTERN.count(r"\p{Han}]+|") == 1
    assert PATTERN.endswith(r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@given(st.text())
def test_decode_inverts_encode(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_lone_surrogate_becomes_the_replacement_character():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("unit", [" ", "x", "\n", "ab ", "é"])
def test_long_runs_are_split(unit):
    text = unit * (900_000 // len(unit))
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(text)) == text.encode()


def test_runs_are_cut_after_25000_characters_from_their_start():
    tokenizer = Tokenizer([*byte_tokens(), b"xy", b"xyz"])
    ids = tokenizer.encode("a " + "xyz" * 10_000)
    pieces = [tokenizer.decode([token_id]) for token_id in ids]
    assert pieces == ["a", " ", *["xyz"] * 8_333, "x", "y", "z", *["xyz"] * 1_666]


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.integers(0, 99))
def test_detokenizer_equals_decode_at_any_split(ids, seed):
    rng = random.Random(seed)
    detokenizer = Detokenizer(TOKENIZER)
    texts = []
    rest = ids
    while rest:
        size = rng.randint(1, len(rest))
        texts.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    texts.append(detokenizer.flush())
    assert "".join(texts) == TOKENIZER.decode(ids)


def test_detokenizer_never_returns_half_a_character():
    detokenizer = Detokenizer(TOKENIZER)
    emitted = [detokenizer.push([byte]) for byte in "é🙂".encode()]
    assert emitted == ["", "é", "", "", "", "🙂"]
    assert detokenizer.push("🙂".encode()[:3]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.push(b"a") == "a"


@pytest.mark.parametrize("token_id", [-1, TOKENIZER.vocab_size])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    with pytest.raises(RequestError, match=str(token_id)):
        TOKENIZER.decode([0, token_id])


def test_rank_file_round_trip(tmp_path):
    write_rank_file(tmp_path / RANK_FILE, byte_tokens())
    loaded = Tokenizer.load(tmp_path)
    text = "message <|sep|> 汉字 12345"
    assert loaded.encode(text) == TOKENIZER.encode(text)


def test_byte_tokens_have_no_two_digits():
    digits = [sum(byte in b"0123456789" for byte in token) for token in byte_tokens()]
    assert max(digits) == 1


def lines(tokens):
    return [
        base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(tokens)
    ]


GOOD = lines(byte_tokens())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "empty"),
        ([b"", b"  "], "empty"),
        ([*GOOD, b"!!!! 999"], f"line {len(GOOD) + 1}.*not base64"),
        ([*GOOD[:3], b"justonefield", *GOOD[3:]], "line 4.*expected"),
        ([*GOOD, b"YWI= -1"], f"line {len(GOOD) + 1}.*expected"),
        ([*GOOD, b"YWI= x"], "expected"),
        ([*GOOD, b"cXE= 5"], f"line {len(GOOD) + 1}: rank 5 appears twice"),
        ([*GOOD, GOOD[0].split()[0] + b" %d" % len(GOOD)], "two ranks"),
        (GOOD[:100] + GOOD[101:], "rank 100 is missing"),
        (lines(byte_tokens()[1:]), "0x00"),
        (["🙂".encode() + b" 0"], "line 1"),
    ],
)
def test_damaged_rank_files_are_refused_by_file_and_line(tmp_path, content, message):
    path = tmp_path / RANK_FILE
    path.write_bytes(b"\n".join(content))
    with pytest.raises(CheckpointError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert str(path) in str(error.value)


def test_missing_rank_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=RANK_FILE):
        Tokenizer.load(tmp_path / "nowhere")
