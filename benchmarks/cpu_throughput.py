"""Prefill and decode tokens/s of a checkpoint on a CPU, beside mlx-lm.

Both run the same checkpoint in fp32 (experts from MXFP4) on the same cores with the same number of
threads, on the same prompts, greedily, in the same run, in the order A B B A. Ours is the whole
engine, scheduler and sampler included; mlx-lm is its model and an argmax. mlx-lm lives in an
environment of its own; where --mlx-python names none, its figures read "not run".
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import NANO, Model
from tercel.cli.options import Json
from tercel.cli.progress import counting_bar
from tercel.config import EngineConfig, SamplingParams
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.engine import Engine
from tercel.runtime.tokenizer import Tokenizer

WORKER = Path(__file__).with_name("mlx_worker.py")
BATCHES = {1: 1.0, 8: 2.0}
"""Batch size to the ratio of rates that it has to reach."""
OURS, THEIRS = "tercel", "mlx-lm"


@dataclass(frozen=True)
class Run:
    """One batch from prompt to last token."""

    prefill_s: float
    decode_s: float
    tokens: list[list[int]]


class Contender(Protocol):
    def run(self, prompts: list[list[int]], new_tokens: int) -> Run: ...


class Ours:
    """The engine in this process."""

    def __init__(self, model: Path, threads: int, batch: int) -> None:
        config = EngineConfig(
            model=str(model),
            dtype="float32",
            device="cpu",
            num_threads=threads,
            max_running=batch,
            max_step_tokens=8192,
        )
        self._engine = Engine(config, open_model=open_checkpoint)

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        for name, prompt in zip(tokens, prompts, strict=True):
            self._engine.add_request(name, prompt, params)
        start = time.perf_counter()
        self._step(tokens)
        prefilled = time.perf_counter()
        while self._engine.has_work:
            self._step(tokens)
        end = time.perf_counter()
        return Run(prefilled - start, end - prefilled, list(tokens.values()))

    def _step(self, tokens: dict[str, list[int]]) -> None:
        for output in self._engine.step():
            tokens[output.request_id] += output.token_ids


class Mlx:
    """mlx-lm in its own environment, driven line by line."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        command = [python, str(WORKER), str(model)]
        pool = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **pool},
        )
        self.versions: dict[str, str] = self._answer()

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        assert self._process.stdin is not None
        print(json.dumps([prompts, new_tokens]), file=self._process.stdin, flush=True)
        return Run(**self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("mlx-lm ended; see its message above")
        return json.loads(line)  # type: ignore[no-any-return]


@contextmanager
def cores(count: int) -> Iterator[None]:
    """This process and its children on the first `count` cores that it may use."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """`count` word problems as chat prompts, cut to one length."""
    tokenizer = Tokenizer.load(model)
    encoded = [
        encode(tokenizer, render([{"role": "user", "content": problem.question}]))
        for problem in islice(generate(seed=11), count)
    ]
    length = min(len(ids) for ids in encoded)
    return [ids[-length:] for ids in encoded]


def measure(
    contenders: dict[str, Contender],
    prompts: list[list[int]],
    new_tokens: int,
    rounds: int,
    report: Callable[[int], None],
) -> dict[str, list[Run]]:
    """`rounds` runs of each contender, in the order A B B A."""
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.run(prompts, 4)
    for index in range(rounds):
        for name in contenders if index % 2 == 0 else reversed(contenders):
            runs[name].append(contenders[name].run(prompts, new_tokens))
        report(index + 1)
    return runs


def rates(runs: list[Run], prompt_tokens: int, new_tokens: int) -> dict[str, float]:
    """Medians, tokens/s."""
    return {
        "prefill": prompt_tokens / statistics.median(run.prefill_s for run in runs),
        "decode": new_tokens / statistics.median(run.decode_s for run in runs),
    }


def figures(batch: int, prompts: list[list[int]], runs: dict[str, list[Run]]) -> Iterator[Figure]:
    """Both rates of both contenders and their ratios; the goal is the decode rate's."""
    generated = len(runs[OURS][0].tokens[0]) - 1
    measured = {
        name: rates(each, sum(map(len, prompts)), batch * generated) for name, each in runs.items()
    }
    peer = measured.get(THEIRS)
    for phase, ours in measured[OURS].items():
        label = f"{phase}, batch {batch}"
        theirs = None if peer is None else peer[phase]
        ratio = None if theirs is None else ours / theirs
        yield Figure(f"{label}: {OURS} tokens/s", ours, form=",.1f")
        yield Figure(f"{label}: {THEIRS} tokens/s", theirs, form=",.1f")
        goal = BATCHES[batch] if phase == "decode" else None
        yield Figure(f"{label}: ratio", ratio, ">=", goal, ".2f")
    tokens = {name: [run.tokens for run in each] for name, each in runs.items()}
    is_same = all(each == [tokens[OURS][0]] * len(each) for each in tokens.values())
    same = None if peer is None else float(is_same)
    yield Figure(f"batch {batch}: same tokens", same, "=", 1.0, ".0f")


def main(
    model: Model = NANO,
    mlx_python: Annotated[str | None, typer.Option(help="Python that has mlx-lm.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 4,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    as_json: Json = False,
) -> None:
    """Prefill and decode tokens/s beside mlx-lm."""
    found: list[Figure] = []
    settings: dict[str, Any] = {"threads": threads, "new tokens": new_tokens, "rounds": rounds}
    with ExitStack() as stack:
        stack.enter_context(cores(threads))
        mlx = None if mlx_python is None else Mlx(mlx_python, model, threads)
        if mlx is not None:
            stack.callback(mlx.close)
            settings.update(mlx.versions)
        report = stack.enter_context(counting_bar("Rounds"))
        for done, batch in enumerate(BATCHES):
            contenders: dict[str, Contender] = {OURS: Ours(model, threads, batch)}
            if mlx is not None:
                contenders[THEIRS] = mlx
            prompts = prompts_of(model, batch)
            settings[f"prompt tokens, batch {batch}"] = sum(map(len, prompts))

            def progress(index: int, done: int = done) -> None:
                report(done * rounds + index, len(BATCHES) * rounds)

            runs = measure(contenders, prompts, new_tokens, rounds, progress)
            found += figures(batch, prompts, runs)
    publish(Report("Tokens/s on a CPU in fp32", tuple(found), settings), as_json)


if __name__ == "__main__":
    typer.run(main)
