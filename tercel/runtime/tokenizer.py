"""K3's tokenizer: a tiktoken rank file, a split pattern and 256 special slots above the ranks."""

import base64
import codecs
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tiktoken

from tercel.errors import CheckpointError, RequestError

RANK_FILE = "tiktoken.model"
NUM_SPECIAL_SLOTS = 256

BOS = "[BOS]"
EOS = "[EOS]"
UNK = "[UNK]"
PAD = "[PAD]"
END_OF_MSG = "<|end_of_msg|>"
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"

# Offset from the number of base tokens -> name. The slots between are <|reserved_token_ID|>.
_NAMED_SLOTS = {
    0: BOS,
    1: EOS,
    2: END_OF_MSG,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: UNK,
    255: PAD,
}

# A model writes only these special tokens; every other slot is input or unused.
_SAMPLED_SLOTS = frozenset({EOS, END_OF_MSG, OPEN, CLOSE, SEP})

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

# Kimi K2's and K3's published split pattern; one alternative per line, the first match wins.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# The regex engine's stack and its quadratic look-ahead bound what one call may see.
_MAX_PIECE_CHARS = 400_000
_MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """Text to token ids and back.

    Ids 0..base-1 are the ranks of the file; base..base+255 are the special slots.
    """

    def __init__(self, tokens: Sequence[bytes], name: str = RANK_FILE) -> None:
        """`tokens`: base tokens by rank, the 256 single bytes among them. `name`: for errors."""
        _check_ranks(tokens, name)
        base = len(tokens)
        names = [
            _NAMED_SLOTS.get(slot, f"<|reserved_token_{base + slot}|>")
            for slot in range(NUM_SPECIAL_SLOTS)
        ]
        self._special_ids = {text: base + slot for slot, text in enumerate(names)}
        self._bytes = [*tokens, *(text.encode() for text in names)]
        self._encoding = tiktoken.Encoding(
            name=name,
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens=self._special_ids,
        )

    @classmethod
    def load(cls, model_dir: str | Path) -> "Tokenizer":
        """Reads `tiktoken.model` of a checkpoint.

        Raises:
            CheckpointError: the file is missing, empty or damaged; names the file and the line.
        """
        path = Path(model_dir) / RANK_FILE
        return cls(read_rank_file(path), name=str(path))

    @classmethod
    def load_or_bytes(cls, model_dir: str | Path) -> "Tokenizer":
        """As `load`; without a rank file a vocabulary of single bytes, which serves a model of
        random weights."""
        if (Path(model_dir) / RANK_FILE).exists():
            return cls.load(model_dir)
        return cls(byte_tokens(), name="bytes")

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: special names in it stay text. A lone surrogate becomes U+FFFD."""
        ids: list[int] = []
        for piece in _pieces(text):
            ids += self._encoding.encode_ordinary(piece)
        return ids

    def encode_special(self, name: str) -> int:
        """The id of a special slot by its name, for example `<|open|>`."""
        if name not in self._special_ids:
            raise RequestError("special token", f"{name!r} is not in this vocabulary")
        return self._special_ids[name]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids; special slots give their names.

        Raises:
            RequestError: an id outside the vocabulary.
        """
        size = self.vocab_size
        ids = list(ids)
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestError("token_ids", f"{token_id} is outside 0..{size - 1}")
        return b"".join([self._bytes[token_id] for token_id in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    @property
    def num_base_tokens(self) -> int:
        """Tokens of the rank file; also the id of the first special slot."""
        return len(self._bytes) - NUM_SPECIAL_SLOTS

    @property
    def vocab_size(self) -> int:
        """Base tokens plus the 256 special slots."""
        return len(self._bytes)

    @property
    def bos_id(self) -> int:
        """[BOS]; chat prompts do not start with it."""
        return self._special_ids[BOS]

    @property
    def eos_id(self) -> int:
        """<|end_of_msg|>: what a model ends its turn with. [EOS] is a second stop id."""
        return self._special_ids[END_OF_MSG]

    @property
    def pad_id(self) -> int:
        """[PAD]."""
        return self._special_ids[PAD]

    @property
    def unk_id(self) -> int:
        """[UNK]."""
        return self._special_ids[UNK]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return frozenset({self.eos_id, self._special_ids[EOS]})

    @property
    def illegal_ids(self) -> frozenset[int]:
        """Ids that must never be sampled: every special slot a model does not write."""
        return frozenset(
            token_id for name, token_id in self._special_ids.items() if name not in _SAMPLED_SLOTS
        )


class Detokenizer:
    """Text of a growing sequence of ids; never returns part of a UTF-8 sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with these ids."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """What is left at the end: an unfinished sequence becomes U+FFFD. Ready for reuse."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def read_rank_file(path: str | Path) -> list[bytes]:
    """Reads tokens by rank from lines of `base64 rank`; the lines may be in any order.

    Raises:
        CheckpointError: the file cannot be read, is empty, or a line is damaged.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(
            f"{path}: the tokenizer's rank file cannot be read ({error.strerror}); "
            f"copy {RANK_FILE} of the checkpoint there"
        ) from error
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rank, token = _parse_rank_line(line, f"{path}, line {number}")
            if rank in tokens:
                raise CheckpointError(f"{path}, line {number}: rank {rank} appears twice")
            tokens[rank] = token
    if not tokens:
        raise CheckpointError(f"{path}: the rank file is empty; download it again")
    if max(tokens) != len(tokens) - 1:
        missing = next(rank for rank in range(len(tokens)) if rank not in tokens)
        raise CheckpointError(
            f"{path}: rank {missing} is missing, the file is cut or damaged; download it again"
        )
    return [tokens[rank] for rank in range(len(tokens))]


def write_rank_file(path: str | Path, tokens: Sequence[bytes]) -> None:
    """Writes base tokens, in rank order, as a tiktoken rank file."""
    _check_ranks(tokens, str(path))
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    Path(path).write_text("".join(lines), encoding="ascii")


def byte_tokens() -> list[bytes]:
    """All 256 bytes and the merges of the chat format's own words: a vocabulary for tests.

    No token has two digits. Every prefix of a word is a token, so that BPE can reach the word.
    """
    words = [b" role", b" tool", b" type", b" key", b" index", b'="', b"message", b"assistant"]
    words += [b"think", b"response", b"user", b"argument", b"call", b"the", b"\n\n", b"<|", b"|>"]
    prefixes = (word[:end] for word in words for end in range(2, len(word) + 1))
    return [bytes([byte]) for byte in range(256)] + list(dict.fromkeys(prefixes))


def _pieces(text: str) -> Iterator[str]:
    """Cuts text so that no piece and no run of (non-)whitespace in it exceeds the limits."""
    for start in range(0, len(text), _MAX_PIECE_CHARS):
        piece = text[start : start + _MAX_PIECE_CHARS]
        cuts = [0, *_cuts_in_runs(piece), len(piece)]
        for begin, end in itertools.pairwise(cuts):
            yield piece[begin:end]


def _cuts_in_runs(piece: str) -> list[int]:
    if len(piece) <= _MAX_RUN_CHARS:
        return []
    return [
        cut
        for run in _RUN.finditer(piece)
        for cut in range(run.start() + _MAX_RUN_CHARS, run.end(), _MAX_RUN_CHARS)
    ]


def _parse_rank_line(line: bytes, where: str) -> tuple[int, bytes]:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit() or len(fields[1]) > 9:
        raise CheckpointError(f"{where}: expected `base64 rank`, found {line[:80]!r}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except ValueError as error:
        raise CheckpointError(f"{where}: {fields[0][:80]!r} is not base64 ({error})") from error
    if not token:
        raise CheckpointError(f"{where}: the token is empty")
    return int(fields[1]), token


def _check_ranks(tokens: Sequence[bytes], name: str) -> None:
    seen: dict[bytes, int] = {}
    for rank, token in enumerate(tokens):
        if token in seen:
            raise CheckpointError(
                f"{name}: token {token!r} has two ranks, {seen[token]} and {rank}"
            )
        seen[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in seen]
    if missing:
        raise CheckpointError(
            f"{name}: {len(missing)} of the 256 single bytes have no rank, "
            f"the first is 0x{missing[0]:02x}; text with it cannot be encoded"
        )
