"""Trains a drafter on a target's own answers and writes it as a SpecForge checkpoint.

    python -m training.dspark.train --model checkpoints/nano --out out

The target answers prompts, and the drafter is trained on what the target saw meanwhile, in turns;
saved every `--save-seconds`, and last measured by decoding held-out problems.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from tercel.core.drafter import Embedding
from tercel.core.drafter_formats import drafter_config
from tercel.reference.drafter import Drafter
from tercel.runtime.tokenizer import Tokenizer
from training.dspark.data import Pool, Prompts, Writer
from training.dspark.drafter import config_json, export, init_weights, reference_config
from training.dspark.evaluate import evaluate
from training.dspark.objective import Weights, anchors, loss
from training.dspark.target import Target
from training.nano.optimizer import build


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, the prompts aside."""

    steps: int
    seconds: float
    """Wall time in which training ends, writing included; where it falls short of `steps`, the
    schedule runs by time."""
    write_share: float = 0.5
    """Of the time, in which the target writes."""
    length: int = 320
    """Tokens of a row: prompt and answer."""
    write_rows: int = 512
    """Rows that the target works on at a time."""
    greedy_share: float = 0.5
    """Of the answers; the others are drawn at temperature 1."""
    max_passes: int = 32
    """Passes after which an answer that has not settled is left out."""
    pool: int = 16384
    """Rows to draw from."""
    batch: int = 256
    """Rows per step."""
    anchors: int = 16
    """Blocks per row."""
    matrix_lr: float = 0.01
    vector_lr: float = 2e-3
    warmup: float = 0.04
    clip: float = 1.0
    seed: int = 17


class Log:
    """One JSON line per event, also printed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._start = time.monotonic()

    def __call__(self, event: str, **values: Any) -> None:
        seconds = round(time.monotonic() - self._start, 1)
        line = json.dumps({"event": event, "seconds": seconds, **values})
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def rate(progress: float, recipe: Recipe) -> float:
    """Warm up, then half a cosine to zero; progress runs from 0 to 1."""
    if progress < recipe.warmup:
        return progress / recipe.warmup
    turned = torch.tensor((progress - recipe.warmup) / (1 - recipe.warmup) * torch.pi)
    return float(0.5 * (1 + turned.cos()))


def train(
    drafter: Drafter,
    target: Target,
    writer: Writer,
    recipe: Recipe,
    log: Log,
    save: Callable[[], None],
    save_seconds: float,
) -> None:
    """Runs the recipe; a line per 200 steps. The first rows that settle are kept for checks."""
    device = target.embed.device
    optimizers = build(
        drafter,
        matrix_lr=recipe.matrix_lr,
        vector_lr=recipe.vector_lr,
        weight_decay=0.0,
        embeddings=("markov_w1.weight", "markov_w2.weight"),
    )
    base = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    generator = torch.Generator(device).manual_seed(recipe.seed)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    weights, pool = Weights(), Pool(recipe.pool)
    start = saved = time.monotonic()
    held_out = writer.step()
    while not len(held_out):
        held_out = writer.step()
    pool.put(writer.step())
    writing, progress, step = time.monotonic() - start, 0.0, 0
    while progress < 1 and step < recipe.steps:
        now = time.monotonic()
        if writing < recipe.write_share * (now - start):
            pool.put(writer.step())
            writing += time.monotonic() - now
        scale = rate(progress, recipe)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, lr in zip(groups, base, strict=True):
            group["lr"] = lr * scale
        rows = pool.draw(recipe.batch, generator)
        positions, exists = anchors(rows, recipe.anchors, generator)
        with autocast:
            result = loss(drafter, target, rows, positions, exists, weights)
        result.total.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        now = time.monotonic()
        progress = max(step / recipe.steps, (now - start) / recipe.seconds)
        if step % 200 == 0 or step == recipe.steps or progress >= 1:
            with torch.no_grad(), autocast:
                positions, exists = anchors(held_out, recipe.anchors, generator)
                check = loss(drafter, target, held_out, positions, exists, weights)
            log(
                "step",
                step=step,
                lr_scale=round(scale, 4),
                rows=writer.num_rows,
                unsettled=writer.num_unsettled,
                loss=round(float(result.total.detach()), 4),
                held_out_loss=round(float(check.total), 4),
                held_out_accepted=[round(x, 4) for x in check.accepted.tolist()],
                held_out_matched=[round(x, 4) for x in check.matched.tolist()],
                confidence_loss=round(float(check.confidence), 4),
            )
        if now - saved > save_seconds:
            save()
            saved = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--conversations", type=Path, help="JSON lines; without it nano's word problems"
    )
    parser.add_argument("--taps", type=int, nargs="+", default=[1, 3, 5, 6])
    parser.add_argument("--mask-token-id", type=int, default=1278)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--intermediate-size", type=int, default=768)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--save-seconds", type=float, default=30)
    parser.add_argument("--write-rows", type=int, default=Recipe.write_rows)
    parser.add_argument("--pool", type=int, default=Recipe.pool)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--anchors", type=int, default=Recipe.anchors)
    parser.add_argument("--length", type=int, default=Recipe.length)
    parser.add_argument("--matrix-lr", type=float, default=Recipe.matrix_lr)
    parser.add_argument("--workers", type=int, default=12, help="processes that encode prompts")
    parser.add_argument("--problems", type=int, default=100, help="held-out problems decoded last")
    arguments = parser.parse_args()
    names = "steps seconds write_rows pool batch anchors length matrix_lr"
    recipe = Recipe(**{name: getattr(arguments, name) for name in names.split()})
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "log.jsonl").open("w") as file:
        run(arguments, recipe, Log(file))


def run(arguments: argparse.Namespace, recipe: Recipe, log: Log) -> None:
    prompts = Prompts(
        arguments.model,
        arguments.conversations,
        batch=64,
        length=recipe.length,
        seed=recipe.seed,
    ).loader(arguments.workers)
    torch._dynamo.config.disable = True  # the optimizer's few small products are not worth a wait
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target(arguments.model, device)
    config = config_json(
        target.config,
        arguments.model,
        taps=arguments.taps,
        mask_token_id=arguments.mask_token_id,
        max_position_embeddings=target.max_position_embeddings,
        layers=arguments.layers,
        intermediate_size=arguments.intermediate_size,
    )
    drafter = Drafter(reference_config(drafter_config(config), Embedding.MASK_ROW))
    init_weights(drafter, target.embed.cpu(), recipe.seed)
    drafter.to(device)
    size = sum(parameter.numel() for parameter in drafter.parameters())
    log("start", device=str(device), parameters=size, recipe=asdict(recipe))

    writer = Writer(
        target,
        drafter.config,
        prompts,
        rows=recipe.write_rows,
        length=recipe.length,
        greedy_share=recipe.greedy_share,
        stop_ids=Tokenizer.load(arguments.model).stop_ids,
        max_passes=recipe.max_passes,
        seed=recipe.seed,
    )

    def save() -> None:
        export(drafter, config, target.embed, arguments.out)

    train(drafter, target, writer, recipe, log, save, arguments.save_seconds)
    save()
    log("trained")
    if arguments.problems:
        for figures in evaluate(target, drafter, arguments.model, arguments.problems):
            log("evaluated", **figures)


if __name__ == "__main__":
    main()
