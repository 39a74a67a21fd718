"""A model whose next token is a function of what it reads back from its caches.

Its caches remember who wrote every position, so a wrong page, slot or clearing is an error at once.
"""

import os
import time
import zlib
from array import array
from dataclasses import replace

from tercel.config import EngineConfig
from tercel.core.sampling import RowResult, StepResult, TokenLogprobs
from tercel.core.step import SINK, Row, StepPlan
from tercel.errors import CheckpointError, ConfigError
from tercel.runtime.runner import OpenModel
from tercel.runtime.tokenizer import Tokenizer, byte_tokens


def next_token(history, seed, vocab_size):
    return zlib.crc32(array("q", [seed, *history]).tobytes()) % vocab_size


TOKENIZER = Tokenizer(byte_tokens())
LETTERS = TOKENIZER.encode("abc de") + TOKENIZER.encode("é")


def letters(history, seed, vocab_size):
    """Draws letters, half of a two-byte letter, sometimes the end of the message."""
    number = next_token(history, seed, 1 << 30)
    return TOKENIZER.eos_id if number % 40 == 0 else LETTERS[number % len(LETTERS)]


def guesses(history, count, seed, vocab_size, draw):
    """What a drafter would say: what is drawn, with some tokens wrong."""
    history, drafts = list(history), []
    for _ in range(count):
        token = draw(history, seed, vocab_size)
        is_wrong = next_token(history, seed + 1, 4) == 0
        drafts.append((token + 1) % vocab_size if is_wrong else token)
        history.append(drafts[-1])
    return tuple(drafts)


class ShadowRunner:
    """Runs plans on shadow caches. `not_finite` holds (request id, position) of broken rows."""

    def __init__(
        self,
        *,
        page_size,
        vocab_size,
        max_step_tokens,
        pad_rows_to=0,
        not_finite=(),
        draw=next_token,
    ):
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.max_step_tokens = max_step_tokens
        self.pad_rows_to = pad_rows_to
        self.not_finite = frozenset(not_finite)
        self.draw = draw
        self.pages = {}
        self.slots = {}
        self.num_steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        assert 0 < plan.num_tokens <= self.max_step_tokens
        self._check_disjoint(plan)
        assert SINK not in plan.fresh_pages
        for page in plan.fresh_pages:
            self.pages[page] = {}
        width, rows = plan.tokens_per_verify_row, max(len(plan.verify), self.pad_rows_to)
        padded = plan.padded(rows, width, self.page_size) if plan.verify else plan
        histories = {}
        for row in padded.rows:
            if row.request_id == "":
                assert row.slot == SINK and set(row.pages) == {SINK}
                self.slots[SINK] = None
            else:
                histories[row.request_id] = self._step(row)
        sampled = [(row, row.seq_len) for row in plan.prefill if row.samples]
        sampled += [(row, row.context_len + 1) for row in plan.verify]
        return StepResult(
            tuple(
                self._result(row, histories[row.request_id][:known], plan.num_drafts)
                for row, known in sampled
            )
        )

    def calls(self):
        return {"fake": self.num_steps}

    def check(self):
        pass

    def close(self):
        self.is_closed = True

    def _check_disjoint(self, plan):
        rows = plan.rows
        pages = [page for row in rows for page in row.pages]
        slots = [row.slot for row in rows]
        assert len(set(pages)) == len(pages) and SINK not in pages
        assert len(set(slots)) == len(slots) and SINK not in slots
        assert len({row.request_id for row in rows}) == len(rows)

    def _step(self, row: Row):
        """Checks what the row reads, writes its tokens, returns its whole history."""
        expected = (row.request_id, row.context_len, row.pending)
        assert row.context_len == 0 or self.slots[row.slot] == expected
        assert row.num_tokens == 1 or len(row.pages) * self.page_size >= row.seq_len
        history = []
        for position in range(row.context_len):
            request_id, written, token = self._page(row, position)[position % self.page_size]
            assert (request_id, written) == (row.request_id, position)
            history.append(token)
        for position, token in enumerate(row.tokens, start=row.context_len):
            page = self._page(row, position)
            # What is there already can only be a draft of this request that was rejected.
            earlier = page.get(position % self.page_size)
            assert earlier is None or earlier[:2] == (row.request_id, position), "never cleared"
            page[position % self.page_size] = (row.request_id, position, token)
        self.slots[row.slot] = (row.request_id, row.seq_len, 0)
        return history + list(row.tokens)

    def _page(self, row, position):
        return self.pages[row.pages[position // self.page_size]]

    def _result(self, row, history, num_drafts):
        """As sample-match: what is drawn after each token, as long as the drafts are that."""
        known, tokens, reports = len(history), [], []
        for draft in (*row.drafts, None):
            if (row.request_id, len(history)) in self.not_finite:
                return RowResult(row.request_id, tuple(tokens), False, tuple(reports))
            sampling = row.sampling_at(len(history))
            token = self.draw(history, sampling.seed, self.vocab_size)
            history.append(token)
            tokens.append(token)
            if sampling.logprobs is not None:
                reports.append(TokenLogprobs(token, -0.5, 1, ((token, -0.5),)))
            if token != draft:
                break
        accepted = len(tokens) - 1
        self.slots[row.slot] = (row.request_id, known + accepted, accepted)
        drafts = guesses(history, num_drafts, row.sampling.seed, self.vocab_size, self.draw)
        return RowResult(row.request_id, tuple(tokens), True, tuple(reports), drafts)


def run_alone(prompt_ids, params, *, max_model_len, stop_ids=(), vocab_size, draw=next_token):
    """The tokens of a request that has the model to itself, and why it ended."""
    history, limit = list(prompt_ids), min(max_model_len, len(prompt_ids) + params.max_tokens)
    while True:
        token = draw(history, params.seed, vocab_size)
        history.append(token)
        num_output = len(history) - len(prompt_ids)
        if token in stop_ids and num_output > params.min_tokens:
            return history[len(prompt_ids) :], "stop"
        if len(history) >= limit:
            return history[len(prompt_ids) :], "length"


def open_fake(config: EngineConfig, *, max_position_embeddings=64, **options) -> OpenModel:
    """A model with the vocabulary of bytes behind the interface of a checkpoint."""

    def load(progress):
        if progress is not None:
            progress(1, 1)
        return ShadowRunner(
            page_size=config.page_size,
            vocab_size=TOKENIZER.vocab_size,
            max_step_tokens=config.max_step_tokens,
            **({"draw": letters} | options),
        )

    return OpenModel(TOKENIZER, TOKENIZER.vocab_size, max_position_embeddings, load)


def open_slow(config):
    """Steps of two milliseconds."""

    def draw(*arguments):
        time.sleep(0.002)
        return letters(*arguments)

    return open_fake(config, max_position_embeddings=4096, draw=draw)


def open_failing(config):
    def draw(*arguments):
        raise RuntimeError("device lost")

    return open_fake(config, draw=draw)


def open_damaged(config):
    def load(progress):
        raise CheckpointError("weights.safetensors: cut short; download it again")

    return replace(open_fake(config), load=load)


def open_refused(config):
    raise ConfigError("layout: 'x' is not a layout name")


def open_dying(config):
    os._exit(3)


def open_sleeping(config):
    return replace(open_fake(config), load=lambda progress: time.sleep(60))
