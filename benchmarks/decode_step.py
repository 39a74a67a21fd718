"""Decode steps of a model of random weights on a GPU, beside the bytes that they must read.

Kimi-Linear 48B by default: its published configuration, weights drawn on the device. A step is
timed as the engine runs it (plan, graph, sampler, tokens on the host) and as its graph alone.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu_results import write
from benchmarks.paths import ROOT
from tercel.config import EngineConfig, SamplingParams
from tercel.contract.timing import copy_bandwidth
from tercel.core.step import Row, StepClass, StepPlan
from tercel.parallel import SingleGroup
from tercel.runtime.checkpoint import open_files
from tercel.runtime.llm import LLM
from tercel.targets.load import Plan
from tercel.targets.program import record
from tercel.targets.state import CacheSizes, create_cache
from tercel.weights.load import meta_model

CONFIG = ROOT / "tests/configs/kimi_linear.json"
PROMPT = 100
WARM_STEPS, STEPS = 12, 48
KERNELS = 12
"""Of a graph that are named."""
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 1024,
    "max_step_tokens": 4096,
    "seed": 0,
}


def floor_bytes(plan: Plan, batch: int, context: int, width: int = 1) -> dict[str, int]:
    """Bytes that one decode step must move: everything once, and of the experts those that so many
    tokens reach when all are equally likely. Its rows have `width` tokens."""
    page_size = EngineConfig().page_size
    pages = -(-(context + width) // page_size)
    rows = tuple(Row(str(i), (1,) * width, context, 1, (1,) * pages) for i in range(batch))
    model, place = plan.place.model, plan.place
    weights = meta_model(model, place.layout, place.rank, dtype=plan.dtype, packs=plan.packs())
    sizes = CacheSizes(num_pages=4, page_size=page_size, num_slots=4, max_draft=width - 1)
    meta: dict[str, Any] = {"dtype": plan.dtype, "device": torch.device("meta")}
    cache = create_cache(place, SingleGroup(), sizes=sizes, **meta)
    step_class = StepClass.DECODE if width == 1 else StepClass.VERIFY
    plans = {step_class: StepPlan(verify=rows)}
    calls = record(plan.route.row, plan.binding, weights, cache, place, page_size, plans)
    total = experts = 0
    tokens = batch * width
    slots, count = tokens * model.num_experts_per_token, model.num_experts
    reached = count * (1 - (1 - model.num_experts_per_token / count) ** tokens)
    for call in calls[step_class]:
        if call.site == "experts":
            experts += int(call.bytes * reached / min(slots, count))
        else:
            total += call.bytes
    return {"bytes": total + experts, "expert_bytes": experts}


def time_steps(llm: LLM, batch: int) -> dict[str, Any]:
    """Medians over decode steps of `batch` requests."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=WARM_STEPS + STEPS + 8, ignore_eos=True)
    for index in range(batch):
        prompt = [(17 * index + 31 * position) % 256 for position in range(PROMPT)]
        engine.add_request(f"{batch}-{index}", prompt, params)
    for _ in range(-(-batch * PROMPT // engine.config.max_step_tokens) + WARM_STEPS):
        engine.step()
    before = dict(engine.stats().program_calls)
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    after = engine.stats().program_calls
    plain = sorted(
        {
            key
            for key, count in after.items()
            if count > before.get(key, 0) and key.endswith((":portable", ":reference"))
        }
    )
    engine.abort_all()
    ordered = sorted(times)
    return {
        "step_ms": statistics.median(times),
        "low_ms": ordered[len(ordered) // 10],
        "high_ms": ordered[-1 - len(ordered) // 10],
        "graph_ms": graph_ms(llm, sink_plan(llm, batch)),
        "kernels": kernel_times(llm, sink_plan(llm, batch)),
        "portable_sites": plain,
    }


def sink_plan(llm: LLM, batch: int, width: int = 1, num_drafts: int = 0) -> StepPlan:
    """A greedy step that touches the sinks only."""
    pages = (0,) * -(-(PROMPT + width) // llm.engine.config.page_size)
    rows = (Row("", (i,) * width, PROMPT, 0, pages, num_drafts=width - 1) for i in range(batch))
    return StepPlan(verify=tuple(rows), num_drafts=num_drafts)


@torch.inference_mode()
def graph_ms(llm: LLM, plan: StepPlan) -> float | None:
    """The graph of a step alone; None where steps run op by op."""
    graphs = llm.engine._runner._graphs  # type: ignore[attr-defined]
    if graphs is None:
        return None
    size = graphs.size_of(plan)
    times = []
    for _ in range(STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graphs.run(plan, size)
        start.record()
        graphs._graphs[size].replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@torch.inference_mode()
def kernel_times(llm: LLM, plan: StepPlan) -> list[tuple[str, int, float]]:
    """(kernel, launches, microseconds) in the graph of a step, longest first. Launches overlap: a
    kernel's time holds its wait for the one before."""
    graphs = llm.engine._runner._graphs  # type: ignore[attr-defined]
    if graphs is None:
        return []
    replay = graphs._graphs[graphs.size_of(plan)].replay
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        replay()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = [(name, len(each), sum(each)) for name, each in spent.items()]
    return sorted(rows, key=lambda row: -row[2])[:KERNELS]


def main(
    out: Annotated[Path, typer.Option(help="Results file.")] = ROOT / "docs/benchmarks/h200.json",
    config: Annotated[Path, typer.Option(help="Published config.json.")] = CONFIG,
    batches: Annotated[str, typer.Option(help="Requests decoded together.")] = "1,8,32",
    device: str = "cuda",
    name: str = "kimi_linear_48b",
    graphs: bool = True,
) -> None:
    """Time decode steps and write them down."""
    sizes = [int(size) for size in batches.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(config, Path(directory) / "config.json")
        started = time.monotonic()
        options = {**OPTIONS, "device": device, "max_running": max(sizes), "decode_graphs": graphs}
        llm = LLM(directory, **options)
        loaded_s = time.monotonic() - started
        plan = open_files(llm.engine.config).plan(0)
    is_gpu = device != "cpu"
    rate = copy_bandwidth(1 << 30 if is_gpu else 1 << 26, device=device)
    result: dict[str, Any] = {
        "weight_bytes": plan.weight_bytes,
        "loaded_s": loaded_s,
        "certified": plan.certified,
        "copy_bytes_per_s": rate,
        "memory_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
        "steps": {},
    }
    typer.echo(
        f"{plan.weight_bytes / 1e9:.1f} GB drawn in {loaded_s:.1f} s, copy {rate / 1e9:.0f} GB/s"
    )
    for batch in sizes:
        floor = floor_bytes(plan, batch, PROMPT + WARM_STEPS + STEPS // 2)
        found = time_steps(llm, batch)
        floor_ms = floor["bytes"] / rate * 1e3
        result["steps"][str(batch)] = {**found, **floor, "floor_ms": floor_ms}
        typer.echo(
            f"batch {batch}: step {found['step_ms']:.3f} ms, graph {found['graph_ms']} ms, floor "
            f"{floor_ms:.3f} ms ({floor['bytes'] / 1e9:.2f} GB); portable sites: "
            f"{', '.join(found['portable_sites']) or 'none'}"
        )
        for kernel, launches, microseconds in found["kernels"]:
            typer.echo(f"  {microseconds:8.1f} us in {launches:3} of {kernel}")
        write(out, name, result)
    llm.close()


if __name__ == "__main__":
    typer.run(main)
