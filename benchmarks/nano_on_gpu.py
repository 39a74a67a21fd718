"""nano on a GPU against a CPU, problem by problem: answers, greedy texts, and where texts part.

The CPU runs the portable target in fp32. Where texts part, the fp32 logits of the common prefix say
by how little the two best tokens differ: less than bf16 can tell apart, or something is wrong.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu_results import write
from benchmarks.paths import NANO, ROOT, Model
from tercel.config import EngineConfig, SamplingParams
from tercel.contract import PLAIN
from tercel.core.group import Groups
from tercel.core.inputs import build_inputs
from tercel.core.step import Row, StepClass, StepPlan
from tercel.gates.problems import Problem, extract_answer, generate
from tercel.parallel import SingleGroup
from tercel.runtime.chat import ChatParser, collect, encode, render, start_channel
from tercel.runtime.checkpoint import load_weights, open_files
from tercel.runtime.llm import LLM
from tercel.runtime.tokenizer import Tokenizer
from tercel.targets.state import CacheSizes, create_cache
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.fingerprint import fingerprint

CPU_ANSWERS = ROOT / "benchmarks/nano_cpu_answers.json"
SEED = 20
MAX_TOKENS = 400
BATCH = 16
WIDEST_ULPS = 4.0
"""Of bf16: what the logits of two tokens between which a text parts may lie apart."""
BF16_BITS = 8
"""Significant bits; the last is an ulp."""


@dataclass(frozen=True)
class Answer:
    """What one device made of one problem."""

    tokens: tuple[int, ...]
    is_right: bool


def prompts_of(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Of `count` fresh problems of the trained templates."""
    problems = islice(generate(seed=SEED), count)
    return [encode(tokenizer, render(_messages(problem))) for problem in problems]


def _messages(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.question}]


def ask(llm: LLM, count: int) -> list[Answer]:
    """The greedy answers to the problems of prompts_of."""
    problems = list(islice(generate(seed=SEED), count))
    prompts = prompts_of(llm.tokenizer, count)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    answers = []
    texts = llm.generate(prompts, params)
    for problem, text in zip(problems, texts, strict=True):
        parser = ChatParser(llm.tokenizer, start=start_channel(render(_messages(problem))))
        content = collect(parser.push(text.token_ids) + parser.finish()).content
        is_right = extract_answer(content) == problem.answer
        answers.append(Answer(tuple(text.token_ids), is_right))
    return answers


class Oracle:
    """fp32 logits of the portable target on a CPU."""

    def __init__(self, model: Path) -> None:
        opened = open_files(EngineConfig(model=str(model), mode="off", device="cpu"))
        plan, group = opened.plan(0), SingleGroup()
        self._program = plan.program(load_weights(opened, plan, None), Groups(group, group))
        self._page_size = opened.config.page_size
        sizes = CacheSizes(num_pages=33, page_size=self._page_size, num_slots=2)
        where: dict[str, Any] = {"dtype": plan.dtype, "device": opened.device}
        self._cache = create_cache(plan.place, group, sizes=sizes, **where)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[vocabulary] after `tokens`."""
        pages = tuple(range(1, 2 + len(tokens) // self._page_size))
        plan = StepPlan(prefill=(Row("a", tuple(tokens), 0, 1, pages),))
        device = torch.device("cpu")
        inputs = build_inputs(plan, page_size=self._page_size, device=device)
        logits = self._program.run(inputs, self._cache, StepClass.PREFILL)
        assert logits is not None
        return logits[0]


@dataclass(frozen=True)
class Fork:
    """Where the text of a problem first differs."""

    problem: int
    position: int
    margin: float
    """Between the two best fp32 logits."""
    ulps: float
    """The margin in bf16 steps of the best logit."""


def fork_of(
    problem: int, prompt: Sequence[int], cpu: Answer, gpu: Answer, oracle: Oracle
) -> Fork | None:
    """None where the texts are equal."""
    if cpu.tokens == gpu.tokens:
        return None
    pairs = zip(cpu.tokens, gpu.tokens, strict=False)
    shorter = min(len(cpu.tokens), len(gpu.tokens))
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    best, second = oracle.logits([*prompt, *cpu.tokens[:at]]).topk(2).values.tolist()
    ulp = 2.0 ** (math.floor(math.log2(abs(best))) + 1 - BF16_BITS)
    return Fork(problem, at, best - second, (best - second) / ulp)


def logprob_difference(llm: LLM, prompt: list[int], oracle: Oracle) -> float:
    """The largest over the five best of a few tokens: that the devices compute differently, and how
    much."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    text = llm.generate(prompt, params)
    found = 0.0
    for index, token in enumerate(text.logprobs):
        logits = oracle.logits([*prompt, *text.token_ids[:index]])
        exact = logits.double().log_softmax(-1)
        found = max(found, *(abs(value - float(exact[other])) for other, value in token.top))
    return found


def refuse_wide(forks: Sequence[Fork]) -> None:
    """Ends the process with exit status 1 where a text parted by more than a rounding."""
    wide = [fork for fork in forks if fork.ulps >= WIDEST_ULPS]
    for fork in wide:
        text = f"problem {fork.problem} parts at token {fork.position} by {fork.ulps:.1f} ulps"
        typer.echo(f"{text}: not a rounding", err=True)
    if wide:
        raise typer.Exit(1)


def paired_p(cpu: Sequence[Answer], gpu: Sequence[Answer]) -> float:
    """Of McNemar's exact test: how likely are so uneven disagreements by chance."""
    first = sum(a.is_right and not b.is_right for a, b in zip(cpu, gpu, strict=True))
    second = sum(b.is_right and not a.is_right for a, b in zip(cpu, gpu, strict=True))
    total = first + second
    tail = sum(math.comb(total, k) for k in range(min(first, second) + 1)) / 2**total
    return min(1.0, 2 * tail)


def decode_sites(llm: LLM, prompt: list[int]) -> dict[str, int]:
    """Calls per site, op and implementation of decode steps alone."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.add_request("sites", prompt, params)
    engine.step()
    before = dict(engine.stats().program_calls)
    while engine.has_work:
        engine.step()
    after = engine.stats().program_calls
    new = {key: count - before.get(key, 0) for key, count in after.items()}
    return {key: count for key, count in new.items() if count}


def on_cpu(model: Path, count: int, file: Path) -> list[Answer]:
    """The CPU's answers, kept in `file` together with the fingerprint of the weights."""
    weights = fingerprint(Checkpoint.open(model))
    held = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if held.get("weights") == weights and len(held["answers"]) >= count:
        return [Answer(tuple(tokens), right) for tokens, right in held["answers"][:count]]
    with LLM(model, mode="off", device="cpu", max_running=BATCH) as llm:
        answers = ask(llm, count)
    found = {"weights": weights, "answers": [[a.tokens, a.is_right] for a in answers]}
    file.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    return answers


def main(
    cpu_answers: Annotated[
        Path, typer.Option(help="The CPU's answers; computed where they are of other weights.")
    ] = CPU_ANSWERS,
    out: Annotated[Path, typer.Option(help="Results file.")] = ROOT / "docs/benchmarks/h200.json",
    model: Model = NANO,
    problems: int = 200,
    device: str = "cuda",
    only_cpu: bool = False,
) -> None:
    """Ask both devices the same problems and write down how they differ."""
    cpu = on_cpu(model, problems, cpu_answers)
    typer.echo(f"CPU: {sum(a.is_right for a in cpu)} of {len(cpu)} right")
    if only_cpu:
        return
    with LLM(model, device=device, max_running=BATCH) as llm:
        prompts = prompts_of(llm.tokenizer, problems)
        gpu = ask(llm, problems)
        sites = decode_sites(llm, prompts[0])
        oracle = Oracle(model)
        difference = logprob_difference(llm, prompts[0], oracle)
    found = [fork_of(i, prompts[i], cpu[i], gpu[i], oracle) for i in range(problems)]
    forks = [fork for fork in found if fork is not None]
    result = {
        "problems": problems,
        "cpu_right": sum(a.is_right for a in cpu),
        "gpu_right": sum(a.is_right for a in gpu),
        "paired_p": paired_p(cpu, gpu),
        "equal_texts": 1 - len(forks) / problems,
        "forks": [vars(fork) for fork in forks],
        "widest_fork_ulps": max((fork.ulps for fork in forks), default=0.0),
        "logprob_difference": difference,
        "decode_calls": sites,
        "portable_sites": sorted(key for key in sites if key.rpartition(":")[2] in PLAIN),
    }
    write(out, "nano_on_gpu", result)
    shown = {name: value for name, value in result.items() if name != "decode_calls"}
    typer.echo(json.dumps(shown, indent=1))
    refuse_wide(forks)


if __name__ == "__main__":
    typer.run(main)
