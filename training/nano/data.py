"""Batches of token rows for training: encoded conversations with a weight per token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tercel.runtime.chat.encoding import render
from tercel.runtime.chat.segments import encode
from tercel.runtime.tokenizer import Tokenizer
from training.nano.conversations import (
    Conversation,
    long_conversations,
    plain_texts,
    short_conversations,
)

PROMPT_WEIGHT = 0.1
"""Loss weight of tokens that the model reads and does not write."""

PLAIN_SHARE = 0.04
"""Fraction of the long rows that are plain text."""


class CachingTokenizer(Tokenizer):
    """Remembers the ids of segments: most pieces of a prompt are the same tags and directives."""

    def __init__(self, tokens: Sequence[bytes], name: str = "tiktoken.model") -> None:
        super().__init__(tokens, name)
        self._cached = lru_cache(maxsize=4096)(super().encode)

    def encode(self, text: str) -> list[int]:
        return self._cached(text)


@dataclass(frozen=True)
class Shape:
    """One kind of batch: `rows` rows of `length` tokens, of short or of long conversations."""

    rows: int
    length: int
    long: bool


def encode_conversation(
    tokenizer: Tokenizer, conversation: Conversation
) -> tuple[list[int], list[float]]:
    """Ids of a conversation and a weight for each: 1 for what the assistant writes.

    The prompt of the last assistant turn is encoded as a server would encode it, so that options
    that render behind the messages, such as tool_choice, stand where the model will see them.
    """
    messages, options = conversation.messages, conversation.options
    shown = {key: value for key, value in options.items() if key != "tool_choice"}
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ids: list[int] = []
    weights: list[float] = []
    for turn in turns:
        is_last = turn == turns[-1]
        bare = encode(tokenizer, render(messages[:turn], **shown))
        whole = encode(
            tokenizer, render(messages[: turn + 1], add_generation_prompt=False, **shown)
        )
        prompt = encode(tokenizer, render(messages[:turn], **options)) if is_last else bare
        assert whole[: len(bare)] == bare and prompt[: len(ids)] == ids
        weights += [PROMPT_WEIGHT] * (len(prompt) - len(ids)) + [1.0] * (len(whole) - len(bare))
        ids = prompt + whole[len(bare) :]
    return ids, weights


def encoded_rows(
    model_dir: Path, gsm8k: Path, shape: Shape, seed: int
) -> Iterator[tuple[list[int], list[float]]]:
    """Endless encoded conversations that fit a row of the shape; longer ones are dropped."""
    tokenizer = CachingTokenizer.load(model_dir)
    rng = np.random.default_rng(seed)
    texts = plain_texts(seed, gsm8k)
    conversations = long_conversations(seed, gsm8k) if shape.long else short_conversations(seed)
    while True:
        if shape.long and rng.random() < PLAIN_SHARE:
            ids = tokenizer.encode(next(texts))
            weights = [1.0] * len(ids)
        else:
            ids, weights = encode_conversation(tokenizer, next(conversations))
        if len(ids) <= shape.length:
            yield ids, weights


def batches(
    model_dir: Path, gsm8k: Path, shape: Shape, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: ids int16 [rows, length + 1] and weights fp16 of the same shape.

    A row holds one conversation, from the zero state that a request starts from. What is left of
    it repeats the row from its start with weight 0, so that routing sees no padding.
    """
    rows = encoded_rows(model_dir, gsm8k, shape, seed)
    while True:
        ids = np.zeros((shape.rows, shape.length + 1), np.int16)
        weights = np.zeros((shape.rows, shape.length + 1), np.float16)
        for row in range(shape.rows):
            tokens, weight = next(rows)
            ids[row] = np.resize(np.array(tokens, np.int16), shape.length + 1)
            weights[row, : len(weight)] = weight
        yield torch.from_numpy(ids), torch.from_numpy(weights)
