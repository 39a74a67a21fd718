"""A long run of an engine that drafts: random arrivals, cancels and preemptions, nothing leaks.

    python -m tests.runtime.soak --steps 20000            scheduler, on shadow caches
    python -m tests.runtime.soak --steps 20000 --nano     nano and its drafter, on a CPU
    python -m tests.runtime.soak --steps 20000 --nano --rule token

Every request that ends by itself must give what it gives alone: under rule match by plain decoding,
under the others with as many guesses per step. These draw otherwise after a step with fewer, which
keeps the law and not the tokens; so their run has pages for all, and no request pauses. A draw that
a rounding decides may differ, by the batch that a product is computed in. So a request whose tokens
differ runs alone again and again with logits that are off by up to MARGIN, the target's and the
drafter's: the share of these runs that part as the soak did is printed, and the soak fails where
none does.
"""

import argparse
import json
import random
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from tercel.config import EngineConfig, SamplingParams
from tercel.gates.acceptance import AcceptanceGate
from tercel.ops.gemm.lm_head import lm_head
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.engine import Engine
from tercel.runtime.tokenizer import Tokenizer
from tercel.targets import binding
from tests.runtime.fakes import TOKENIZER, next_token, open_fake, run_alone

MARGIN = 1e-5
TRIES = 32
CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NANO = CHECKPOINTS / "nano"


def shadow(drafter):
    """An engine whose runner checks every page and slot that it reads."""
    config = EngineConfig(
        page_size=4, cache_tokens=160, max_running=6, max_step_tokens=48, drafter=drafter
    )

    def open_model(config):
        model = open_fake(config, max_position_embeddings=64, draw=next_token)
        object.__setattr__(model, "max_drafts", 7 if drafter else 0)
        return model

    return Engine(config, open_model=open_model)


def nano(rule=None, max_running=5):
    """Without a rule there is no drafter."""
    config = EngineConfig(
        model=str(NANO),
        device="cpu",
        num_threads=1,
        page_size=16,
        cache_tokens=448 if rule in (None, "match") else 1024,
        max_running=max_running,
        max_step_tokens=96,
        drafter=str(CHECKPOINTS / "nano-dspark") if rule else None,
        acceptance=rule or "match",
        adaptive_drafts=rule == "match",
    )
    return Engine(config, open_model=partial(open_checkpoint))


def problems():
    """Prompts that nano answers, and its drafter guesses."""
    return AcceptanceGate(problems=200, seed=31).prompts(Tokenizer.load(NANO))


class Soak:
    """Feeds an engine and keeps what came out."""

    def __init__(self, engine, seed, longest, problems=()):
        """Every other prompt is one of `problems`, the others are random."""
        self.engine, self.longest, self.problems = engine, longest, problems
        self.chance = random.Random(seed)
        self.requests, self.tokens, self.reasons = {}, {}, {}
        self.num_steps = self.num_cancelled = 0

    def step(self):
        if self.chance.random() < 0.3 and len(self.requests) - len(self.reasons) < 9:
            self._arrive()
        if self.chance.random() < 0.02 and self.requests.keys() - self.reasons.keys():
            name = self.chance.choice(sorted(self.requests.keys() - self.reasons.keys()))
            self._record(self.engine.abort(name))
            self.num_cancelled += 1
        for output in self.engine.step():
            self._record(output)
        self.num_steps += 1

    def finish(self):
        while self.engine.has_work:
            for output in self.engine.step():
                self._record(output)

    def _arrive(self):
        name = str(len(self.requests))
        if self.problems and self.chance.random() < 0.5:
            prompt = self.chance.choice(self.problems)
        else:
            length = self.chance.randint(1, self.longest)
            prompt = [self.chance.randrange(40, 90) for _ in range(length)]
        params = SamplingParams(
            temperature=self.chance.choice([0.0, 0.7, 1.0]),
            top_k=self.chance.choice([0, 5]),
            seed=len(self.requests),
            max_tokens=self.chance.randint(1, self.longest),
        )
        self.engine.add_request(name, prompt, params)
        self.requests[name] = prompt, params
        self.tokens[name] = []

    def _record(self, output):
        self.tokens[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--nano", action="store_true")
    parser.add_argument("--rule", choices=("match", "token", "block"), default="match")
    arguments = parser.parse_args(argv)
    if arguments.nano:
        soak = Soak(nano(arguments.rule), 5, 30, problems())
    else:
        soak = Soak(shadow("shadow"), 5, 30)
    start = time.monotonic()
    while soak.num_steps < arguments.steps and time.monotonic() - start < arguments.seconds:
        soak.step()
    soak.finish()
    stats = soak.engine.stats()
    assert (stats.usage.num_used_pages, stats.usage.num_used_slots) == (0, 0), "something leaks"
    soak.engine.close()
    ended = [name for name, reason in soak.reasons.items() if reason in ("stop", "length")]
    texts = partial(nano_texts, rule=arguments.rule) if arguments.nano else shadow_texts
    expected = texts({name: soak.requests[name] for name in ended})
    different = {
        name: share_near(soak.requests[name], soak.tokens[name], expected[name], arguments.rule)
        if arguments.nano
        else 0.0
        for name in ended
        if soak.tokens[name] != expected[name]
    }
    print(
        json.dumps(
            {
                "rule": arguments.rule,
                "steps": soak.num_steps,
                "requests": len(soak.requests),
                "cancelled": soak.num_cancelled,
                "preemptions": stats.usage.num_preemptions,
                "rounds": stats.rounds.to_dict(),
                "compared": len(ended),
                "different": different,
            }
        )
    )
    raise SystemExit(not all(different.values()))


def share_near(request, ours, alone, rule, *, size=MARGIN, tries=TRIES):
    """Of `tries` runs of `request` alone, each logit off by up to `size`: the share that has the
    tokens of `ours` as far as it has parted from `alone`."""
    pairs = enumerate(zip(ours, alone, strict=False))
    parted = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(alone))) + 1
    with disturbed_logits(size):
        runs = nano_texts({str(i): request for i in range(tries)}, rule, max_running=1)
    return sum(text[:parted] == ours[:parted] for text in runs.values()) / tries


@contextmanager
def disturbed_logits(size):
    """Of every engine that is made within it."""
    generator, plain = torch.Generator().manual_seed(0), binding.counted

    def counted(name, bound, counts):
        call = plain(name, bound, counts)
        if bound.op is not lm_head:
            return call

        def off(*args, **kwargs):
            logits = call(*args, **kwargs)
            noise = torch.rand(logits.shape, generator=generator, dtype=logits.dtype)
            return logits + size * (2 * noise - 1)

        return off

    binding.counted = counted
    try:
        yield
    finally:
        binding.counted = plain


def shadow_texts(requests):
    """What plain decoding gives each request that has the model to itself."""
    size, stops = TOKENIZER.vocab_size, TOKENIZER.stop_ids
    options = {"max_model_len": 64, "stop_ids": stops, "vocab_size": size, "draw": next_token}
    return {name: run_alone(*request, **options)[0] for name, request in requests.items()}


def nano_texts(requests, rule, max_running=None):
    """Under rule match those of plain decoding, all together; under the others of each request
    by itself."""
    rule = None if rule == "match" else rule
    engine, tokens = nano(rule, max_running=max_running or (1 if rule else 5)), {}
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
        tokens[name] = []
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    engine.close()
    return tokens


if __name__ == "__main__":
    main()
