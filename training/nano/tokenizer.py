"""Trains nano's rank file: K3's split pattern, 1024 base tokens, none with two digits.

python -m training.nano.tokenizer --gsm8k train.jsonl --out checkpoints/nano
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tercel.runtime.chat.encoding import render
from tercel.runtime.tokenizer import (
    BOS,
    CLOSE,
    END_OF_MSG,
    NUM_SPECIAL_SLOTS,
    OPEN,
    PAD,
    PATTERN,
    RANK_FILE,
    SEP,
    UNK,
    Tokenizer,
    write_rank_file,
)
from training.nano.conversations import (
    gsm8k_conversation,
    long_conversations,
    read_gsm8k,
    short_conversations,
)

NUM_BASE_TOKENS = 1024
SEED = 17


def corpus(gsm8k: Path) -> Iterator[str]:
    """Every piece of text that the encoder hands to BPE, for a sample of the training mix."""
    conversations = [
        *islice(short_conversations(SEED), 12_000),
        *islice(long_conversations(SEED, gsm8k), 4_000),
        *map(gsm8k_conversation, read_gsm8k(gsm8k)),
    ]
    for conversation in conversations:
        for segment in render(conversation.messages, **conversation.options):
            if not segment.special:
                yield segment.text


def train_ranks(texts: Iterator[str]) -> list[bytes]:
    """The 256 bytes, then merges by frequency.

    Training sees one digit per piece where K3's pattern allows three, so no merge joins digits;
    the pattern itself stays K3's.
    """
    pieces = Regex(PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"))
    bpe = BpeTokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=NUM_BASE_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    to_byte = _byte_level_alphabet()
    vocabulary = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(to_byte[char] for char in token) for token, _ in vocabulary if len(token) > 1]
    return [bytes([byte]) for byte in range(256)] + merged


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte: printable Latin-1 stays, the others move above it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer_config.json: every special slot, of which the tags' markers are kept in text."""
    slots = range(tokenizer.num_base_tokens, tokenizer.num_base_tokens + NUM_SPECIAL_SLOTS)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    names = {slot: tokenizer.decode([slot]) for slot in slots}
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": BOS,
        "eos_token": END_OF_MSG,
        "pad_token": PAD,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "added_tokens_decoder": {
            str(slot): {"content": name, **flags, "special": name not in (OPEN, CLOSE, SEP)}
            for slot, name in names.items()
            if "reserved_token" not in name
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_rank_file(arguments.out / RANK_FILE, train_ranks(corpus(arguments.gsm8k)))
    config = tokenizer_config(Tokenizer.load(arguments.out))
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
