import math
from collections import Counter

import pytest
import torch

from tercel.config import EngineConfig, SamplingParams
from tercel.core.cache import LatentCache, ModelCache
from tercel.core.step import Row, StepPlan, TokenLimits
from tercel.parallel import SingleGroup
from tercel.runtime.engine import Engine
from tercel.runtime.model_runner import ModelRunner
from tercel.runtime.runner import OpenModel
from tercel.runtime.sampler import Sampler
from tercel.runtime.step_work import StepWork
from tests.runtime.fakes import TOKENIZER

CPU = torch.device("cpu")
PAGE_SIZE = 4
POISON = 99
"""A prompt token whose latent is NaN."""


class SumProgram:
    """Writes each token's id as its latent; the next token is one of the letters, chosen by the sum
    of all latents of the row. What is past a row's end is multiplied by zero, as attention does."""

    def __init__(self):
        self.counts = Counter()
        self.shapes = []

    def run(self, inputs, cache, step_class, taps=None):
        pages = cache.latent[0].pages
        self.shapes.append((step_class.value, inputs.tokens.numel()))
        values = inputs.tokens.float().masked_fill(inputs.tokens == POISON, math.nan)
        pages.view(-1)[inputs.slot_mapping] = values
        rows = []
        if inputs.prefill is not None:
            bounds = inputs.prefill.cu_seqlens
            lengths = torch.tensor(inputs.prefill.context_lens) + torch.tensor(bounds).diff()
            rows += self._logits(pages, inputs.prefill.block_table, lengths, bounds[1:])
        if inputs.verify is not None:
            lengths = inputs.verify.context_lens + 1
            ends = range(inputs.num_prefill_tokens + 1, inputs.tokens.numel() + 1)
            rows += self._logits(pages, inputs.verify.block_table, lengths, ends)
        by_row = dict(rows)
        logits = [by_row[row] for row in inputs.sample_rows.tolist()]
        return torch.stack(logits) if logits else torch.zeros(0, TOKENIZER.vocab_size)

    def _logits(self, pages, block_table, lengths, ends):
        context = pages[block_table].flatten(1)
        mask = torch.arange(context.shape[1]) < lengths[:, None]
        sums = (context * mask).sum(-1)
        for total, end in zip(sums.tolist(), ends, strict=True):
            logits = torch.full((TOKENIZER.vocab_size,), -1.0)
            letter = 0 if math.isnan(total) else 97 + int(total * 7) % 26
            logits[letter] = math.nan if math.isnan(total) else 5.0
            yield end - 1, logits


def create(**options):
    """An engine on real tensors, and the program behind it."""
    program = SumProgram()

    def load(progress):
        pages = torch.zeros(17, PAGE_SIZE, 1)
        cache = ModelCache({0: LatentCache(pages)}, {})
        sampler = Sampler(SingleGroup(), TOKENIZER.illegal_ids, CPU)
        limits, sizes = TokenLimits(), {"page_size": PAGE_SIZE, "device": CPU}
        work = StepWork(program, cache, sampler)
        return ModelRunner(work, limits=limits, **sizes, **options)

    def open_model(config):
        return OpenModel(TOKENIZER, TOKENIZER.vocab_size, 64, load)

    config = EngineConfig(page_size=PAGE_SIZE, cache_tokens=64, max_running=4, max_step_tokens=16)
    return Engine(config, open_model=open_model), program


def run(engine, prompts, max_tokens=12):
    texts = dict.fromkeys(prompts, "")
    reasons = {}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0))
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.text
            reasons[output.request_id] = output.finish_reason
    return texts, reasons


PROMPTS = {name: list(range(3, 3 + 5 * size)) for size, name in enumerate("abcdef", 1)}


def test_a_batch_gives_what_each_request_gives_alone():
    engine, program = create()
    texts, _ = run(engine, PROMPTS)
    for name, prompt in PROMPTS.items():
        assert run(create()[0], {name: prompt})[0] == {name: texts[name]}
    assert {kind for kind, _ in program.shapes} == {"prefill", "decode", "mixed"}
    assert engine.stats().usage.num_preemptions > 0


@pytest.mark.parametrize("poisoned_after", [0, 6])
def test_nan_stays_with_its_request_and_leaves_with_it(poisoned_after):
    """Its pages are reused at once: the pool holds four requests of this length and no more."""
    engine, _ = create()
    healthy = {name: [5] * 3 for name in "wxyz"}
    expected, _ = run(create()[0], healthy)
    for name in "abcd":
        engine.add_request(name, [7] * poisoned_after + [POISON] * 9, SamplingParams())
    ended = [output for _ in range(9) if engine.has_work for output in engine.step()]
    assert [output.finish_reason for output in ended] == ["error"] * 4
    assert run(engine, healthy)[0] == expected


def test_nan_of_an_aborted_request_leaves_with_it():
    engine, _ = create()
    engine.add_request("a", [POISON] * 40, SamplingParams())
    engine.step()
    engine.abort("a")
    healthy = {name: [5] * 3 for name in "wxyz"}
    assert run(engine, healthy)[0] == run(create()[0], healthy)[0]


def test_padded_rows_touch_the_sinks_only():
    plan = StepPlan(verify=(Row("a", (5,), 3, 1, (2,)), Row("b", (6,), 0, 2, (3,))))
    padded = plan.padded(5, 1, PAGE_SIZE)
    assert padded.verify[:2] == plan.verify
    assert {(row.slot, row.pages, row.context_len) for row in padded.verify[2:]} == {(0, (0,), 0)}
    assert plan.padded(1, 1, PAGE_SIZE) == plan
    first, second = plan.padded(2, 3, PAGE_SIZE).verify
    assert (first.tokens, first.pages) == ((5, 0, 0), (2, 0)), "tokens past the page go to the sink"
    assert (second.tokens, second.pages, second.num_drafts) == ((6, 0, 0), (3,), 0)
