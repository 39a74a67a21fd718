"""Every parallel layout against one rank: the same texts and the same accuracy, in fp32.

Ranks are threads of this process, and then processes over gloo. The trained checkpoint has four
heads, so that sixteen ranks run a random model which they divide.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import NANO, Model
from benchmarks.thread_ranks import open_threads
from tercel.cli.checkpoint import make_tiny
from tercel.cli.options import Json
from tercel.cli.progress import Report as Progress
from tercel.cli.progress import counting_bar
from tercel.config import SamplingParams
from tercel.core.layout import Layout
from tercel.gates.accuracy import AccuracyGate
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.completions import Completion
from tercel.runtime.llm import LLM
from tercel.runtime.tokenizer import Tokenizer

TRAINED = ("tp2", "tp4", "tp4_moetp2ep2", "tp1_pp2", "tp2_pp2")
"""What four heads divide by."""
DIVISIBLE = ("tp8_pp2", "tp16_moetp4ep4", "tp16_moetp16ep1")
BACKENDS = {"threads": open_threads, "gloo": open_checkpoint}
FOR_16_RANKS = (
    "num_hidden_layers=5",
    "num_attention_heads=16",
    "num_key_value_heads=16",
    "linear_attn_config.num_heads=16",
    "linear_attn_config.head_dim=32",
    "qk_nope_head_dim=32",
    "v_head_dim=32",
    "kv_lora_rank=64",
    "moe_intermediate_size=512",
    "num_experts=8",
)
"""Changes to the tiny model: sixteen of everything, in groups of 32 where MXFP4 needs them."""
KINDS = {False: "the trained checkpoint", True: "a random model"}
RANDOM_TOKENS = 16
"""Per answer of the random model, whose texts mean nothing."""

Texts = list[tuple[int, ...]]


@dataclass
class Recorder:
    """What the gate asks, and the token ids of every answer."""

    llm: LLM
    texts: Texts = field(default_factory=list)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.llm.tokenizer

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
        answers = self.llm.generate(prompts, params)
        self.texts += [tuple(answer.token_ids) for answer in answers]
        return answers


Measure = Callable[[Recorder], float]


def accuracy(problems: int, recorder: Recorder) -> float:
    """Exact match of the gate; the recorder keeps the texts."""
    gate = AccuracyGate(problems=problems, held_out=0, calculator=0)
    return gate.run(recorder).exact_match


def continuations(problems: int, recorder: Recorder) -> float:
    """A few tokens after each problem, which no random model solves."""
    prompts = [
        encode(recorder.tokenizer, render([{"role": "user", "content": problem.question}]))
        for problem in islice(generate(seed=29), problems)
    ]
    params = SamplingParams(temperature=0, max_tokens=RANDOM_TOKENS, ignore_eos=True)
    recorder.generate(prompts, params)
    return 0.0


def run(model: Path, layout: str, open_model: Any, measure: Measure) -> tuple[Texts, float]:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}
    with LLM(model, layout=layout, open_model=open_model, max_running=16, **options) as llm:
        recorder = Recorder(llm)
        score = measure(recorder)
    return recorder.texts, score


def compare(
    model: Path,
    layouts: Sequence[str],
    backends: Sequence[str],
    measure: Measure,
    report: Callable[[], None],
) -> list[Figure]:
    """Two figures per layout and backend: texts equal to one rank's, and the same accuracy."""
    wanted, score = run(model, "tp1", open_checkpoint, measure)
    report()
    figures = []
    for layout in layouts:
        for backend in backends:
            texts, own_score = run(model, layout, BACKENDS[backend], measure)
            same = sum(a == b for a, b in zip(texts, wanted, strict=True))
            name = f"{layout}, {Layout.parse(layout).world_size} ranks over {backend}"
            figures.append(Figure(f"{name}: equal texts", same, "=", len(wanted), ",d"))
            if score:
                figures.append(Figure(f"{name}: exact match", own_score, "=", score, ".1%"))
            report()
    return figures


def main(
    model: Model = NANO,
    problems: Annotated[int, typer.Option(min=1, help="Word problems per layout.")] = 100,
    random_model: Annotated[
        bool, typer.Option("--random", help="A random model, of which 16 ranks have a part each.")
    ] = False,
    layouts: Annotated[
        list[str] | None, typer.Option("--layout", help="Only these; default: all.")
    ] = None,
    backends: Annotated[
        list[str] | None, typer.Option("--backend", help="threads or gloo; default: both.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the texts of every layout with those of one rank."""
    chosen, ways = layouts or (DIVISIBLE if random_model else TRAINED), backends or list(BACKENDS)
    settings = {"problems": problems}
    with counting_bar("Layouts") as bar, tempfile.TemporaryDirectory(prefix="tercel-") as directory:
        step = _counter(bar, len(chosen) * len(ways) + 1)
        if random_model:
            model, measure = Path(directory) / "model", partial(continuations, problems)
            with redirect_stdout(sys.stderr):  # its summary is not part of this program's answer
                make_tiny(model, changes=list(FOR_16_RANKS))
            settings["tokens after each"] = RANDOM_TOKENS
        else:
            measure = partial(accuracy, problems)
        figures = compare(model, chosen, ways, measure, step)
    title = f"Texts of every layout against one rank's, fp32: {KINDS[random_model]}"
    publish(Report(title, tuple(figures), settings), as_json)


def _counter(bar: Progress, total: int) -> Callable[[], None]:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        bar(done, total)

    return step


if __name__ == "__main__":
    typer.run(main)
