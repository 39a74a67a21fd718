"""nano with its drafter on a GPU: speed over plain decoding, beside the bytes that steps must read.

Two engines stand side by side, both with captured steps, and answer the same problems in turns; a
third runs drafting steps op by op. Timed is what comes after the prompts: from plan to tokens on
the host, step by step, until the last request of a batch has ended. Greedy texts are compared, and
where two part, the fp32 logits of a CPU say by how little the two best tokens differ.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.decode_step import floor_bytes, graph_ms, sink_plan
from benchmarks.gpu_results import write
from benchmarks.nano_on_gpu import (
    Answer,
    Fork,
    Oracle,
    decode_sites,
    fork_of,
    prompts_of,
    refuse_wide,
)
from benchmarks.paths import NANO, ROOT, Model
from tercel.config import SamplingParams
from tercel.contract import PLAIN
from tercel.contract.timing import copy_bandwidth
from tercel.core.step import StepPlan
from tercel.runtime.checkpoint import open_files
from tercel.runtime.llm import LLM
from tercel.targets.drafters.block import BlockDrafter, bind_drafter, record
from tercel.targets.recording import Recorder

DRAFTER = ROOT / "checkpoints/nano-dspark"
GREEDY = SamplingParams(temperature=0, max_tokens=300)
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "max_step_tokens": 2048}
CONTEXT = 128
"""Tokens before a step whose bytes are counted."""


@dataclass
class Pace:
    """Steps after the prompts."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    texts: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def answer(llm: LLM, prompts: Sequence[list[int]], pace: Pace) -> float:
    """Answers `prompts` together, adding to `pace`; tokens per second after the prompts."""
    engine = llm.engine
    texts: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for name, prompt in zip(texts, prompts, strict=True):
        engine.add_request(name, prompt, GREEDY)
    for output in engine.step():  # all prompts fit one step
        texts[output.request_id] += output.token_ids
    first, start, steps = sum(map(len, texts.values())), time.perf_counter(), 0
    assert first == len(prompts)
    while engine.has_work:
        steps += 1
        for output in engine.step():
            texts[output.request_id] += output.token_ids
    seconds = time.perf_counter() - start
    tokens = sum(map(len, texts.values())) - first
    pace.tokens, pace.steps, pace.seconds = (
        pace.tokens + tokens,
        pace.steps + steps,
        pace.seconds + seconds,
    )
    pace.texts += [tuple(text) for text in texts.values()]
    return tokens / seconds


def race(
    engines: dict[str, LLM], prompts: Sequence[list[int]], batch: int
) -> tuple[dict[str, Pace], dict[str, list[float]]]:
    """Every engine on every batch of prompts, forwards and backwards in turns."""
    paces = {name: Pace() for name in engines}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    order = list(engines)
    for first in range(0, len(prompts), batch):
        for name in order if first // batch % 2 == 0 else reversed(order):
            part = prompts[first : first + batch]
            rates[name].append(answer(engines[name], part, paces[name]))
    return paces, rates


@torch.inference_mode()
def launches(llm: LLM, plan: StepPlan) -> int | None:
    """Kernels and copies in the graph of a step; None where the profiler sees none."""
    graphs = llm.engine._runner._graphs  # type: ignore[attr-defined]
    replay = graphs._graphs[graphs.size_of(plan)].replay
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        replay()
        torch.cuda.synchronize()
    kinds = [event.device_type for event in trace.events()]
    return sum(kind == torch.autograd.DeviceType.CUDA for kind in kinds) or None


def drafter_bytes(llm: LLM, batch: int, num_drafts: int) -> int:
    """That a step's drafter must move: context rows of `batch` times 1 + `num_drafts` tokens, then
    a block of guesses."""
    live: BlockDrafter = llm.engine._runner._work._drafting._drafter  # type: ignore[attr-defined]
    recorder = Recorder(bind_drafter(live.plan, rows=1))
    sizes = {"requests": batch, "tokens": batch * (1 + num_drafts), "num_drafts": num_drafts}
    record(live.plan, recorder, **sizes, context=CONTEXT)
    return sum(call.bytes for call in recorder.calls)


def compare(prompts: Sequence[list[int]], plain: Pace, drafted: Pace, model: Path) -> list[Fork]:
    """Where greedy texts part."""
    if plain.texts == drafted.texts:
        return []
    oracle = Oracle(model)
    found = []
    for index, prompt in enumerate(prompts):
        ours, theirs = (Answer(pace.texts[index], is_right=True) for pace in (plain, drafted))
        found.append(fork_of(index, prompt, ours, theirs, oracle))
    return [fork for fork in found if fork is not None]


def of_steps(llm: LLM, pace: Pace, plan: StepPlan, floor: int, rate: float) -> dict[str, Any]:
    """What a step of one engine takes."""
    step_ms = pace.seconds / pace.steps * 1e3
    return {
        "tokens_per_s": pace.rate,
        "tokens_per_step": pace.tokens / pace.steps,
        "step_ms": step_ms,
        "graph_ms": graph_ms(llm, plan),
        "launches": launches(llm, plan),
        "bytes": floor,
        "floor_ms": floor / rate * 1e3,
    }


def main(
    out: Annotated[Path, typer.Option(help="Results file.")] = ROOT / "docs/benchmarks/h200.json",
    model: Model = NANO,
    drafter: Annotated[Path, typer.Option(help="Drafter checkpoint of the model.")] = DRAFTER,
    problems: int = 100,
    batches: Annotated[str, typer.Option(help="Requests decoded together.")] = "1,8",
    device: str = "cuda",
) -> None:
    """Race drafting steps against plain ones and write down both."""
    sizes = [int(size) for size in batches.split(",")]
    started, options = time.monotonic(), {**OPTIONS, "device": device, "max_running": max(sizes)}
    engines = {
        "plain": LLM(model, **options),
        "drafted": LLM(model, drafter=str(drafter), **options),
        "op by op": LLM(model, drafter=str(drafter), decode_graphs=False, **options),
    }
    plain, drafted = engines["plain"], engines["drafted"]
    plan = open_files(plain.engine.config).plan(0)
    rate = copy_bandwidth(1 << 30, device=device)
    prompts = prompts_of(plain.tokenizer, problems)
    for llm in engines.values():
        answer(llm, prompts[: max(sizes)], Pace())
    typer.echo(f"ready in {time.monotonic() - started:.1f} s, copy {rate / 1e9:.0f} GB/s")
    count = drafted.engine._speculation.limit(1)  # type: ignore[union-attr]
    captured = {name: engines[name].engine._runner._graphs for name in ("plain", "drafted")}  # type: ignore[attr-defined]
    result: dict[str, Any] = {
        "problems": problems,
        "copy_bytes_per_s": rate,
        "graphs": {name: {"count": len(g), "seconds": g.seconds} for name, g in captured.items()},
        "batches": {},
    }
    parted: list[Fork] = []
    for batch in sizes:
        few = prompts[: 4 * batch]
        _, slow = race({"op by op": engines["op by op"]}, few, batch)
        paces, rates = race({"plain": plain, "drafted": drafted}, prompts, batch)
        forks = compare(prompts, paces["plain"], paces["drafted"], model)
        parted += forks
        bytes_of = {
            "plain": floor_bytes(plan, batch, CONTEXT)["bytes"],
            "drafted": floor_bytes(plan, batch, CONTEXT, 1 + count)["bytes"]
            + drafter_bytes(drafted, batch, count),
        }
        plans = {
            "plain": sink_plan(plain, batch),
            "drafted": sink_plan(drafted, batch, 1 + count, count),
        }
        found = {
            name: of_steps(engines[name], paces[name], plans[name], bytes_of[name], rate)
            for name in plans
        }
        ratios = [new / old for new, old in zip(rates["drafted"], rates["plain"], strict=True)]
        speedup = found["drafted"]["tokens_per_s"] / found["plain"]["tokens_per_s"]
        at_floor = (
            found["drafted"]["tokens_per_step"]
            / found["plain"]["tokens_per_step"]
            * found["plain"]["floor_ms"]
            / found["drafted"]["floor_ms"]
        )
        result["batches"][str(batch)] = {
            **found,
            "op_by_op_tokens_per_s": statistics.median(slow["op by op"]),
            "speedup": speedup,
            "speedup_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
            "speedup_of_graphs": _graph_speedup(found),
            "speedup_at_floor": at_floor,
            "equal_texts": 1 - len(forks) / problems,
            "forks": [vars(fork) for fork in forks],
        }
        typer.echo(f"batch {batch}: {json.dumps(result['batches'][str(batch)], indent=1)}")
    stats = drafted.engine.stats()
    assert stats.rounds is not None
    result["rounds"] = stats.rounds.to_dict()
    result["steps"] = {k: n for k, n in stats.program_calls.items() if k.startswith("step:")}
    sites = decode_sites(drafted, prompts[0])
    result["portable_sites"] = sorted(key for key in sites if key.rpartition(":")[2] in PLAIN)
    write(out, "speculation_on_gpu", result)
    shown = {name: value for name, value in result.items() if name != "batches"}
    typer.echo(json.dumps(shown, indent=1) + f"\n{time.monotonic() - started:.1f} s")
    refuse_wide(parted)


def _graph_speedup(found: dict[str, dict[str, Any]]) -> float | None:
    """Of the device's part alone."""
    rates = [
        each["tokens_per_step"] / each["graph_ms"] if each["graph_ms"] else None
        for each in (found["drafted"], found["plain"])
    ]
    return None if rates[0] is None or rates[1] is None else rates[0] / rates[1]


if __name__ == "__main__":
    typer.run(main)
