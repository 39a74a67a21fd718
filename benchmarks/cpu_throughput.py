"""Prefill and decode tokens/s of a checkpoint on a CPU, beside mlx-lm: `make bench`.

Both run the same checkpoint in fp32 with the same number of threads on the same prompts, greedily,
in the same run, in the order A B B A. Ours is the whole engine, scheduler and sampler included;
mlx-lm is its model and an argmax. mlx-lm lives in an environment of its own (the `oracle` extra);
where --mlx-python names none, its columns read "not run".
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from tercel.config import EngineConfig, SamplingParams
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.engine import Engine
from tercel.runtime.tokenizer import Tokenizer

WORKER = Path(__file__).with_name("mlx_worker.py")
NANO = Path(__file__).parents[1] / "checkpoints/nano"


@dataclass(frozen=True)
class Run:
    """One batch from prompt to last token."""

    prefill_s: float
    decode_s: float
    tokens: list[list[int]]


class Ours:
    """The engine in this process."""

    def __init__(self, model: Path, threads: int, batch: int) -> None:
        self._engine = Engine(
            EngineConfig(
                model=str(model),
                dtype="float32",
                device="cpu",
                num_threads=threads,
                max_running=batch,
                max_step_tokens=8192,
            ),
            open_model=open_checkpoint,
        )
        self._count = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        names = [f"{self._count}-{i}" for i in range(len(prompts))]
        self._count += 1
        tokens: dict[str, list[int]] = {name: [] for name in names}
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, prompt, params)
        start = time.perf_counter()
        prefilled = None
        while self._engine.has_work:
            for output in self._engine.step():
                tokens[output.request_id] += output.token_ids
            prefilled = prefilled or time.perf_counter()
        assert prefilled is not None
        end = time.perf_counter()
        return Run(prefilled - start, end - prefilled, [tokens[name] for name in names])


class Mlx:
    """mlx-lm in its own environment, driven line by line."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        environment = {"OMP_NUM_THREADS": str(threads), "PATH": "/usr/bin:/bin"}
        self._process = subprocess.Popen(
            ["taskset", "-c", f"0-{threads - 1}", python, str(WORKER), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([prompts, new_tokens]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("mlx-lm ended; see its message above")
        return Run(**json.loads(answer))


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """`count` word problems as chat prompts, cut to one length."""
    tokenizer = Tokenizer.load(model)
    encoded = [
        encode(tokenizer, render([{"role": "user", "content": problem.question}]))
        for problem in islice(generate(seed=11), count)
    ]
    length = min(len(ids) for ids in encoded)
    return [ids[-length:] for ids in encoded]


def measure(contenders: dict[str, Any], prompts: list[list[int]], new_tokens: int, rounds: int):
    """Rates per contender: tokens/s of prefill and decode, medians over A B B A rounds."""
    samples: dict[str, list[Run]] = {name: [] for name in contenders}
    for name, contender in contenders.items():
        contender.run(prompts, 4)
    for index in range(rounds):
        for name in contenders if index % 2 == 0 else reversed(contenders):
            samples[name].append(contenders[name].run(prompts, new_tokens))
    return {name: rates(runs, prompts, new_tokens) for name, runs in samples.items()}


def rates(runs: list[Run], prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    prefill = [sum(map(len, prompts)) / run.prefill_s for run in runs]
    decode = [len(prompts) * (new_tokens - 1) / run.decode_s for run in runs]
    return {
        "prefill": statistics.median(prefill),
        "decode": statistics.median(decode),
        "decode_range": [min(decode), max(decode)],
        "tokens": runs[-1].tokens,
    }


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.")] = NANO,
    mlx_python: Annotated[str | None, typer.Option(help="Python that has mlx-lm.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 4,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    results: dict[str, Any] = {"threads": threads, "torch": torch.__version__, "batches": {}}
    for batch in (1, 8):
        contenders: dict[str, Any] = {"tercel": Ours(model, threads, batch)}
        if mlx_python is not None:
            contenders["mlx-lm"] = Mlx(mlx_python, model, threads)
        measured = measure(contenders, prompts_of(model, batch), new_tokens, rounds)
        tokens = [item.pop("tokens") for item in measured.values()]
        results["batches"][batch] = {**measured, "same_tokens": tokens[0] == tokens[-1]}
    if as_json:
        print(json.dumps(results))
        return
    table = Table("batch", "", "tercel tok/s", "mlx-lm tok/s", "ratio", title="fp32, CPU")
    for batch, measured in results["batches"].items():
        for phase in ("prefill", "decode"):
            ours, theirs = measured["tercel"][phase], measured.get("mlx-lm", {}).get(phase)
            peer = "not run" if theirs is None else f"{theirs:.1f}"
            ratio = "" if theirs is None else f"{ours / theirs:.2f}x"
            table.add_row(str(batch), phase, f"{ours:.1f}", peer, ratio)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(typer.run(main))
