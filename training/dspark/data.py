"""What the drafter learns from: answers that the target itself wrote, and what it saw meanwhile.

Answers are decoded by fixed-point iteration: every position is drawn at once, given a guess of the
text before it, and the drawn text is the next guess. The random number of each position is fixed,
so a text that comes back unchanged is what token by token decoding would have written; each pass
settles at least one more token, and a good first guess (a worked answer) nearly all of them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tercel.reference.drafter import Config
from training.dspark.target import Target
from training.nano.conversations import Conversation, short_conversations, tool_conversations
from training.nano.data import CachingTokenizer, encode_conversation

Example = tuple[list[int], int]
"""Ids of a conversation, and where the answer begins, of which they hold a guess."""


@dataclass
class Corpus:
    """Rows of text that the target wrote."""

    tokens: Tensor
    """[N, L]."""
    starts: Tensor
    """[N] first token of the answer."""
    ends: Tensor
    """[N] one past the last token of the answer."""
    taps: Tensor
    """[N, L, taps * hidden] bf16."""
    hidden: Tensor
    """[N, L, hidden] bf16."""

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Tensor) -> "Corpus":
        return Corpus(*(x[index] for x in self.tensors()))

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    @classmethod
    def joined(cls, parts: list["Corpus"]) -> "Corpus":
        return cls(*(torch.cat(x) for x in zip(*(part.tensors() for part in parts), strict=True)))


class Pool:
    """The latest rows, of which batches are drawn; older ones give way."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: Corpus | None = None
        self._next = self._count = 0

    def put(self, rows: Corpus) -> None:
        if self._held is None:
            self._held = Corpus(
                *(x.new_empty(self._capacity, *x.shape[1:]) for x in rows.tensors())
            )
        places = torch.arange(self._next, self._next + len(rows), device=rows.tokens.device)
        for held, x in zip(self._held.tensors(), rows.tensors(), strict=True):
            held[places % self._capacity] = x
        self._next += len(rows)
        self._count = min(self._next, self._capacity)

    def draw(self, count: int, generator: torch.Generator) -> Corpus:
        assert self._held is not None, "something was put"
        device = self._held.tokens.device
        return self._held.rows(
            torch.randint(self._count, (count,), device=device, generator=generator)
        )


class Prompts(IterableDataset[list[Example]]):
    """Endless batches of encoded conversations whose prompts leave room for an answer in `length`
    tokens; every loader worker has its own."""

    def __init__(
        self, model_dir: Path, file: Path | None, *, batch: int, length: int, seed: int
    ) -> None:
        """`file` has JSON lines {"messages": [...], "options": {...}}; an assistant message at
        the end is a guess of the answer. Without it nano's word problems are drawn."""
        self.model_dir, self.file = model_dir, file
        self.batch, self.length, self.seed = batch, length, seed

    def __iter__(self) -> Iterator[list[Example]]:
        worker = get_worker_info()
        share = (worker.id, worker.num_workers) if worker else (0, 1)
        if self.file is None:
            source = word_problems(self.seed + 1000 * share[0])
        else:
            source = conversations_of(self.file, *share)
        found = examples(source, self.model_dir, self.length)
        while batch := list(islice(found, self.batch)):
            yield batch

    def loader(self, workers: int) -> Iterator[list[Example]]:
        options = {"prefetch_factor": 8} if workers else {}
        return iter(DataLoader(self, batch_size=None, num_workers=workers, **options))


def conversations_of(path: Path, first: int, step: int) -> Iterator[Conversation]:
    """Every `step`-th conversation of a file, over and over."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    while mine := lines[first::step]:
        for line in mine:
            messages = line["messages"]
            if messages[-1]["role"] != "assistant":
                messages = [*messages, {"role": "assistant", "content": ""}]
            yield Conversation(messages, line.get("options", {}))


def word_problems(seed: int) -> Iterator[Conversation]:
    """What nano was trained on: problems and drills, and one in six with the calculator."""
    short, tools = short_conversations(seed), tool_conversations(seed)
    while True:
        yield from islice(short, 5)
        yield next(tools)


def examples(
    conversations: Iterator[Conversation], model_dir: Path, length: int
) -> Iterator[Example]:
    """Encoded; an answer takes at least 16 tokens."""
    tokenizer = CachingTokenizer.load(model_dir)
    for conversation in conversations:
        ids, weights = encode_conversation(tokenizer, conversation)
        start = len(ids)
        while start and weights[start - 1] == 1:
            start -= 1
        if start + 16 <= length:
            yield ids[:length], start


def choose(logits: Tensor, uniform: Tensor, temperature: Tensor) -> Tensor:
    """[B, L, V] -> [B, L] the token whose share of the distribution holds the number `uniform`
    [B, L]; rows of `temperature` [B] 0 take the largest."""
    heat = temperature.masked_fill(temperature == 0, 1.0)[:, None, None]
    shares = torch.softmax(logits / heat, -1).cumsum(-1)
    drawn = (shares < uniform[..., None] * shares[..., -1:]).sum(-1)
    return torch.where(temperature[:, None] == 0, logits.argmax(-1), drawn)


class Writer:
    """Has the target answer prompts, a fixed number of rows at a time; a row that has settled makes
    room for the next prompt."""

    def __init__(
        self,
        target: Target,
        drafter: Config,
        prompts: Iterator[list[Example]],
        *,
        rows: int,
        length: int,
        greedy_share: float,
        stop_ids: frozenset[int],
        max_passes: int,
        seed: int,
    ) -> None:
        """`length` is that of a row; `greedy_share` of the answers are greedy, the others drawn at
        temperature 1; an answer that has not settled after `max_passes` is left out."""
        device = target.embed.device
        self._target, self._drafter = target, drafter
        self._examples = (example for batch in prompts for example in batch)
        self._greedy_share, self._max_passes = greedy_share, max_passes
        self._generator = torch.Generator().manual_seed(seed)
        self._stops = torch.tensor(sorted(stop_ids), device=device)
        self._tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self._starts = torch.zeros(rows, dtype=torch.long, device=device)
        self._uniform = torch.zeros(rows, length, device=device)
        self._temperature = torch.zeros(rows, device=device)
        self._passes = torch.full((rows,), max_passes, device=device)
        self.num_rows = 0
        self.num_unsettled = -rows
        """Answers left out so far; the first rows were none."""

    @torch.no_grad()
    def step(self) -> Corpus:
        """One pass; the rows that it found to be what they were drawn from."""
        self._refill()
        tokens, starts = self._tokens, self._starts
        seen = self._target.see(tokens, self._drafter)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        answer = places >= starts[:, None]
        following = choose(self._target.logits(seen.hidden), self._uniform, self._temperature)
        drawn = torch.where(answer, following.roll(1, 1), tokens)
        stopped = torch.isin(drawn, self._stops) & answer
        ends = torch.where(stopped.any(1), stopped.long().argmax(1) + 1, tokens.shape[1])
        settled = ((drawn == tokens) | (places >= ends[:, None])).all(1)
        rows = Corpus(tokens, starts, ends, seen.taps.bfloat16(), seen.hidden.bfloat16())
        written = rows.rows(settled)
        self._tokens = drawn
        self._passes = torch.where(settled, 0, self._passes + 1)
        self.num_rows += len(written)
        return written

    def _refill(self) -> None:
        """New prompts where a row has settled or was given up."""
        given_up = self._passes >= self._max_passes
        self.num_unsettled += int(given_up.sum())
        places = (given_up | (self._passes == 0)).nonzero()[:, 0]
        examples = list(islice(self._examples, len(places)))
        places = places[: len(examples)]
        tokens = torch.zeros(len(examples), self._tokens.shape[1], dtype=torch.long)
        for row, (ids, _) in zip(tokens, examples, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        device = self._tokens.device
        self._tokens[places] = tokens.to(device)
        self._starts[places] = torch.tensor([start for _, start in examples]).to(device)
        self._uniform[places] = torch.rand(tokens.shape, generator=self._generator).to(device)
        heat = torch.rand(len(examples), generator=self._generator) >= self._greedy_share
        self._temperature[places] = heat.float().to(device)
        self._passes[places] = 1
