"""Sections of docs/benchmarks/h200.md about what programs on a GPU found: entries of h200.json."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

SHOWN = 6
"""Kernels of a graph."""


def _measured(entry: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in entry["versions"].items())
    return f"\n`{entry['command']}`, {entry['date']}, {entry['device']}, {versions}\n"


def _decode_steps(entry: dict[str, Any]) -> str:
    rows = [
        (
            batch,
            f"{step['step_ms']:.3f} ({step['low_ms']:.3f}..{step['high_ms']:.3f})",
            "" if step["graph_ms"] is None else f"{step['graph_ms']:.3f}",
            f"{step['floor_ms']:.3f}",
            f"{step['bytes'] / 1e9:.2f}",
            ", ".join(step["portable_sites"]) or "none",
        )
        for batch, step in entry["steps"].items()
    ]
    head = ("batch", "step, ms", "its graph, ms", "byte floor, ms", "GB", "portable calls")
    gigabytes = entry["weight_bytes"] / 1e9
    text = (
        f"## Kimi-Linear 48B, random weights\n\n{gigabytes:.1f} GB of weights drawn on the device, "
        f"ready in {entry['loaded_s']:.0f} s. A step is what the engine takes from plan to tokens "
        "on the host; the floor is the bytes that it must read at the copy bandwidth, experts as "
        "far as so many tokens reach them when all are equally likely. Random weights choose more "
        "alike, so that many tokens read less.\n\n"
    )
    launched = [
        (batch, name.partition("(")[0][:60], str(count), f"{microseconds / 1e3:.3f}")
        for batch, step in entry["steps"].items()
        for name, count, microseconds in step["kernels"][:SHOWN]
    ]
    spent = (
        f"\nThe {SHOWN} kernels that take longest in a step's graph. Launches overlap: a time "
        "holds the wait for the launch before.\n\n"
    )
    spent += table(("batch", "kernel", "launches", "ms"), launched)
    return text + table(head, rows) + spent + _measured(entry)


def _nano(entry: dict[str, Any]) -> str:
    forks = [
        (str(f["problem"]), str(f["position"]), f"{f['margin']:.4f}", f"{f['ulps']:.2f}")
        for f in entry["forks"]
    ]
    count = entry["problems"]
    ops = [key for key in entry["decode_calls"] if key not in entry["portable_sites"]]
    lines = [
        "## nano against the CPU\n",
        f"{count} fresh problems, greedy: {entry['gpu_right']} right on the GPU in bf16, "
        f"{entry['cpu_right']} on a CPU in fp32 (paired, p = {entry['paired_p']:.2f}). "
        f"{entry['equal_texts']:.1%} of the texts are equal (goal: 95 %); where one parts, the two "
        "best fp32 logits differ by the margin below (goal: under 4 bf16 ulps of the logit; widest "
        f"{entry['widest_fork_ulps']:.2f}). Log-probabilities of the five best tokens "
        f"differ by up to {entry['logprob_difference']:.1e}.\n",
        f"Decode steps call {len(ops)} certified implementations and "
        f"{len(entry['portable_sites'])} portable ones"
        f"{': ' if entry['portable_sites'] else ''}{', '.join(entry['portable_sites'])}.\n",
    ]
    head = ("problem", "token", "margin", "ulps")
    return "\n".join(lines) + (table(head, forks, 1) if forks else "") + _measured(entry)


def _speculation(entry: dict[str, Any]) -> str:
    rows = []
    for batch, found in entry["batches"].items():
        for name in ("plain", "drafted"):
            each = found[name]
            rows.append(
                (
                    f"{batch}, {name}",
                    f"{each['tokens_per_s']:.0f}",
                    f"{each['tokens_per_step']:.2f}",
                    f"{each['step_ms']:.3f}",
                    f"{each['graph_ms']:.3f}",
                    f"{each['floor_ms']:.4f}",
                    f"{each['graph_ms'] / each['floor_ms']:.0f}",
                    str(each["launches"] or "not counted"),
                )
            )
    head = (
        "batch",
        "tokens/s",
        "tokens a step",
        "step, ms",
        "its graph, ms",
        "byte floor, ms",
        "graph over floor",
        "launches",
    )
    speed = "\n".join(
        f"- Batch {batch}: {found['speedup']:.2f} times the tokens per second of plain decoding "
        f"({found['speedup_of_graphs']:.2f} by the graphs alone, {found['speedup_at_floor']:.2f} "
        f"by bytes); op by op {found['op_by_op_tokens_per_s']:.0f} tokens/s; "
        f"{found['equal_texts']:.0%} of the texts equal."
        for batch, found in entry["batches"].items()
    )
    forks = [
        (batch, str(f["problem"]), str(f["position"]), f"{f['margin']:.4f}", f"{f['ulps']:.2f}")
        for batch, found in entry["batches"].items()
        for f in found["forks"]
    ]
    rounds, graphs = entry["rounds"], entry["graphs"]
    captured = ", ".join(
        f"{name} {each['count']} in {each['seconds']:.1f} s" for name, each in graphs.items()
    )
    text = (
        "## nano with its drafter\n\nGreedy answers to "
        f"{entry['problems']} fresh problems, whole steps as graphs (captured: {captured}). "
        f"Acceptance length {rounds['acceptance_length']:.2f} of 8; by position "
        f"{', '.join(f'{share:.2f}' for share in rounds['per_position'])}.\n\n{speed}\n\n"
        "Rates are of what comes after the prompts, from plan to tokens on the host; the floor is "
        "the bytes that a step must read at the copy bandwidth. Portable sites of drafting steps: "
        f"{', '.join(entry['portable_sites']) or 'none'}.\n\n"
    )
    parted = ("batch", "problem", "token", "margin", "ulps")
    return text + table(head, rows) + (table(parted, forks) if forks else "") + _measured(entry)


def _sanitizer(entry: dict[str, Any]) -> str:
    rows = [
        (each["kernel"], each["cell"], each["tool"], each["verdict"]) for each in entry["families"]
    ]
    head = ("kernel", "cell", "tool", "verdict")
    return "## compute-sanitizer\n\n" + table(head, rows) + _measured(entry)


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kimi_linear_48b": _decode_steps,
    "nano_on_gpu": _nano,
    "speculation_on_gpu": _speculation,
    "sanitizer": _sanitizer,
}


def sections(entries: Mapping[str, Any]) -> Iterator[str]:
    """Of the entries that have one."""
    for name, entry in entries.items():
        if name in SECTIONS:
            yield SECTIONS[name](entry)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], right: int = 0) -> str:
    """A Markdown table; columns from `right` on are numbers."""
    marks = ["---" if index < right or not right else "---:" for index in range(len(head))]
    lines = [f"| {' | '.join(row)} |" for row in (head, tuple(marks), *rows)]
    return "\n".join(lines) + "\n"
