"""How many of a drafter's guesses a model accepts, on fresh problems, by temperature.

A wrong drafter changes no text: taps of the wrong layer, a mask token's row that was not trained,
positions off by one only lower this figure. So each is compared with what was recorded when the
drafter was healthy, overall and per position, with room for chance where there are few rounds.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tercel.config import SamplingParams
from tercel.errors import ConfigError
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.runtime.completions import Completion
from tercel.runtime.metrics import Stats
from tercel.runtime.proposals import RoundCounts
from tercel.runtime.tokenizer import Tokenizer

HEALTHY_SHARE = 0.97
"""Of the recorded figures, below which a drafter is not healthy."""
CHANCE = 4.0
"""Standard errors that a healthy drafter may be below the record, where that is the wider bound:
more than independent rounds would need, because those of one problem are alike."""
RECORD = "acceptance.json"
"""Beside a drafter's weights: the figures of this gate when it was healthy."""


class Engine(Protocol):
    """What the gate asks of tercel.runtime.engine.Engine."""

    def stats(self) -> Stats: ...


class Generator(Protocol):
    """What the gate asks of tercel.runtime.llm.LLM."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def engine(self) -> Engine: ...
    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]: ...


@dataclass(frozen=True)
class Acceptance:
    """What the gate measures at one temperature."""

    temperature: float
    rounds: RoundCounts
    num_tokens: int
    """Generated."""
    texts: Sequence[tuple[int, ...]]
    """Token ids of every answer."""

    def to_dict(self) -> dict[str, Any]:
        counts = self.rounds.to_dict()
        return {"temperature": self.temperature, "generated_tokens": self.num_tokens, **counts}


@dataclass(frozen=True)
class AcceptanceGate:
    """How many problems to ask, and how."""

    problems: int = 200
    """Problems of trained templates that training never saw."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Measured one after the other."""
    seed: int = 0
    """Of the problems and of the draws."""
    batch: int = 8
    """Requests decoded together."""
    max_tokens: int = 512
    """Tokens of one answer at most."""

    def __post_init__(self) -> None:
        for name in ("problems", "batch", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if any(not 0 <= temperature <= 100 for temperature in self.temperatures):
            raise ConfigError(f"temperatures={self.temperatures} must be 0 .. 100")

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of every problem, as a user asks it."""
        return [
            encode(tokenizer, render([{"role": "user", "content": problem.question}]))
            for problem in islice(generate(self.seed), self.problems)
        ]

    def run(self, llm: Generator, report: Callable[[int, int], None]) -> list[Acceptance]:
        """Asks every problem at every temperature; `report(done, total)` after each wave.

        Raises:
            ConfigError: the engine has no drafter.
        """
        prompts = self.prompts(llm.tokenizer)
        total, measured = len(prompts) * len(self.temperatures), []
        for index, temperature in enumerate(self.temperatures):
            before = _rounds(llm)
            answers: list[Completion] = []
            wave = 4 * self.batch
            for start in range(0, len(prompts), wave):
                params = SamplingParams(
                    temperature=temperature, max_tokens=self.max_tokens, seed=self.seed
                )
                answers += llm.generate(prompts[start : start + wave], params)
                report(index * len(prompts) + len(answers), total)
            tokens = [answer.token_ids for answer in answers]
            counts = _rounds(llm).since(before)
            measured.append(Acceptance(temperature, counts, sum(map(len, tokens)), tokens))
        return measured


def unhealthy(measured: Sequence[Acceptance], recorded: Mapping[str, Any]) -> list[str]:
    """What falls short of the recorded figures: of a temperature, the acceptance length and the
    acceptance of each position."""
    problems = []
    for each in measured:
        healthy = recorded.get(f"{each.temperature:g}")
        if healthy is None:
            continue
        rounds, shares = each.rounds, healthy["per_position"]
        likely = [_smoothed(share, rounds.rounds) for share in shares]
        figures = {"acceptance length": (rounds.acceptance_length, healthy["length"], likely)}
        for position, share in enumerate(shares):
            found = rounds.per_position
            now = found[position] if position < len(found) else 0.0
            figures[f"position {position + 1}"] = now, share, likely[position : position + 1]
        problems += [
            f"temperature {each.temperature:g}: {name} is {now:.3f}, recorded {before:.3f}, "
            f"at least {least:.3f} in {rounds.rounds} rounds"
            for name, (now, before, chances) in figures.items()
            if now < (least := _least(before, chances, rounds.rounds))
        ]
    return problems


def _least(recorded: float, chances: Sequence[float], rounds: int) -> float:
    """What a healthy drafter reaches in so many rounds. The figure is the mean, over rounds, of how
    many guesses are accepted where guess i is, and all before it, with chance `chances[i]`."""
    mean = sum(chances)
    square = sum((2 * count + 1) * chance for count, chance in enumerate(chances))
    error = math.sqrt((square - mean**2) / max(rounds, 1))
    return recorded - max((1 - HEALTHY_SHARE) * recorded, CHANCE * error)


def _smoothed(share: float, rounds: int) -> float:
    """A chance near a recorded share that is neither 0 nor 1, which rounds never miss."""
    return (share * rounds + 2) / (rounds + 4)


def read_record(drafter: Path) -> dict[str, Any]:
    """The healthy figures beside a drafter's weights; empty where none were recorded."""
    path = drafter / RECORD
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8"))["temperatures"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a record of this gate ({error})") from error


def record(measured: Sequence[Acceptance], gate: AcceptanceGate) -> dict[str, Any]:
    """What `read_record` reads."""
    return {
        "problems": gate.problems,
        "seed": gate.seed,
        "temperatures": {
            f"{each.temperature:g}": {
                "length": round(each.rounds.acceptance_length, 4),
                "per_position": [round(share, 4) for share in each.rounds.per_position],
            }
            for each in measured
        },
    }


def _rounds(llm: Generator) -> RoundCounts:
    counts = llm.engine.stats().rounds
    if counts is None:
        raise ConfigError("drafter: the engine has none; name its directory")
    return counts
