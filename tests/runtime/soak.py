"""A long run of an engine that drafts: random arrivals, cancels and preemptions, nothing leaks.

    python -m tests.runtime.soak --steps 20000            scheduler, on shadow caches
    python -m tests.runtime.soak --steps 20000 --nano     nano and its drafter, on a CPU

Every request that ends by itself must give what it gives alone, by plain decoding.
"""

import argparse
import json
import random
import time
from functools import partial
from pathlib import Path

from tercel.config import EngineConfig, SamplingParams
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.engine import Engine
from tests.runtime.fakes import TOKENIZER, next_token, open_fake, run_alone

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


def nano(drafter, rule="match"):
    config = EngineConfig(
        model=str(NANO),
        device="cpu",
        num_threads=1,
        page_size=16,
        cache_tokens=448,
        max_running=5,
        max_step_tokens=96,
        drafter=str(CHECKPOINTS / "nano-dspark") if drafter else None,
        acceptance=rule,
    )
    return Engine(config, open_model=partial(open_checkpoint))


class Soak:
    """Feeds an engine and keeps what came out."""

    def __init__(self, engine, seed, longest):
        self.engine, self.longest = engine, longest
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
        prompt = [
            self.chance.randrange(40, 90) for _ in range(self.chance.randint(1, self.longest))
        ]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--nano", action="store_true")
    arguments = parser.parse_args()
    soak = Soak(nano(True) if arguments.nano else shadow("shadow"), 5, 30)
    start = time.monotonic()
    while soak.num_steps < arguments.steps and time.monotonic() - start < arguments.seconds:
        soak.step()
    soak.finish()
    stats = soak.engine.stats()
    assert (stats.usage.num_used_pages, stats.usage.num_used_slots) == (0, 0), "something leaks"
    soak.engine.close()
    ended = [name for name, reason in soak.reasons.items() if reason in ("stop", "length")]
    texts = plain_texts if arguments.nano else shadow_texts
    expected = texts({name: soak.requests[name] for name in ended})
    different = [name for name in ended if soak.tokens[name] != expected[name]]
    print(
        json.dumps(
            {
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


def shadow_texts(requests):
    """What plain decoding gives each request that has the model to itself."""
    size, stops = TOKENIZER.vocab_size, TOKENIZER.stop_ids
    options = {"max_model_len": 64, "stop_ids": stops, "vocab_size": size, "draw": next_token}
    return {name: run_alone(*request, **options)[0] for name, request in requests.items()}


def plain_texts(requests):
    """Of all requests, decoded together without a drafter."""
    engine, tokens = nano(False), {}
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
