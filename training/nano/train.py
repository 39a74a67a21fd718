"""Trains nano on one GPU and writes its weights.

    python -m training.nano.train --model checkpoints/nano --gsm8k train.jsonl --out out

`--model` holds config.json and tiktoken.model; the shards and a log go to `--out`.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tercel.reference.kimi_k3 import Model, recurrent_kda
from training.nano.data import Shape, batches
from training.nano.evaluate import read_config
from training.nano.export import export
from training.nano.model import CountingRouter, chunked_kda, training_model
from training.nano.optimizer import build


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, the data aside."""

    steps: int
    seconds: float
    """Wall time, compilation included, in which training must end; where it falls short of `steps`,
    the schedule runs by time instead."""
    tokens_per_step: int = 65_536
    short_length: int = 320
    long_length: int = 512
    long_share: float = 0.4
    matrix_lr: float = 0.02
    vector_lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: float = 0.02
    decay: float = 0.6
    """Final fraction of the run over which learning rates fall linearly to zero."""
    balance_rate: float = 1e-3
    seed: int = 11


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of one shape; every loader worker draws from its own seed."""

    def __init__(self, model_dir: Path, gsm8k: Path, shape: Shape, seed: int) -> None:
        self.arguments = (model_dir, gsm8k, shape)
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        return batches(*self.arguments, self.seed + 1000 * (worker.id if worker else 0))


def learning_rate_scale(progress: float, recipe: Recipe) -> float:
    """Warm up, hold, fall linearly to zero; progress runs from 0 to 1."""
    return min(1.0, progress / recipe.warmup, (1 - progress) / recipe.decay)


@torch.compile(dynamic=False)
def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The training loss, and the loss over the tokens that the assistant writes."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    weights = weights.flatten().float()
    written = (weights == 1).float()
    return (losses * weights).sum() / weights.sum(), (losses * written).sum() / written.sum()


def loaders(
    model_dir: Path, gsm8k: Path, recipe: Recipe, workers: int
) -> list[Iterator[tuple[Tensor, Tensor]]]:
    """Short and long batches of the same number of tokens."""
    shapes = [
        Shape(recipe.tokens_per_step // recipe.short_length, recipe.short_length, long=False),
        Shape(recipe.tokens_per_step // recipe.long_length, recipe.long_length, long=True),
    ]
    return [
        iter(
            DataLoader(
                Rows(model_dir, gsm8k, shape, recipe.seed * 1_000_000 + 500 * kind),
                batch_size=None,
                num_workers=workers,
                prefetch_factor=4 if workers else None,
                pin_memory=torch.cuda.is_available(),
            )
        )
        for kind, shape in enumerate(shapes)
    ]


def train(
    model: Model,
    data: list[Iterator[tuple[Tensor, Tensor]]],
    recipe: Recipe,
    device: torch.device,
    log: Path,
) -> None:
    """Runs the recipe; one line of JSON goes to the log every 50 steps."""
    optimizers = build(
        model,
        matrix_lr=recipe.matrix_lr,
        vector_lr=recipe.vector_lr,
        weight_decay=recipe.weight_decay,
    )
    routers = [module for module in model.modules() if isinstance(module, CountingRouter)]
    base = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    forward = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    kinds = torch.rand(recipe.steps, generator=torch.Generator().manual_seed(recipe.seed))
    kinds[:2] = torch.tensor([0.0, 1.0])  # Both shapes are compiled before the clock starts.
    begin = start = time.monotonic()
    progress, step = 0.0, 0
    with log.open("w") as lines:
        lines.write(json.dumps(asdict(recipe)) + "\n")
        while progress < 1 and step < recipe.steps:
            ids, weights = next(data[int(kinds[step] < recipe.long_share)])
            ids = ids.to(device, non_blocking=True).long()
            weights = weights.to(device, non_blocking=True)
            scale = learning_rate_scale(progress, recipe)
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            for group, lr in zip(groups, base, strict=True):
                group["lr"] = lr * scale
            loss, written = weighted_loss(forward(ids[:, :-1]), ids[:, 1:], weights[:, 1:])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 50 == 0 or step == recipe.steps:
                load = torch.stack([router.load / router.load.mean() for router in routers])
                line = {
                    "step": step,
                    "seconds": round(time.monotonic() - start, 1),
                    "loss": round(float(loss.detach()), 4),
                    "written_loss": round(float(written.detach()), 4),
                    "lr_scale": round(scale, 4),
                    "max_load": round(float(load.max()), 3),
                    "min_load": round(float(load.min()), 3),
                }
                print(json.dumps(line), flush=True)
                lines.write(json.dumps(line) + "\n")
            for router in routers:
                router.balance(recipe.balance_rate * scale)
            now = time.monotonic()
            if step == 2:
                start = now
            budget = recipe.seconds - (start - begin)
            progress = max(step / recipe.steps, (now - start) / budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--tokens-per-step", type=int, default=Recipe.tokens_per_step)
    parser.add_argument("--workers", type=int, default=6)
    arguments = parser.parse_args()
    recipe = Recipe(
        steps=arguments.steps,
        seconds=arguments.seconds,
        tokens_per_step=arguments.tokens_per_step,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.config.recompile_limit = 64
    kda = chunked_kda if device.type == "cuda" else recurrent_kda
    data = loaders(arguments.model, arguments.gsm8k, recipe, arguments.workers)
    model = training_model(read_config(arguments.model), recipe.seed, kda).to(device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(model, data, recipe, device, arguments.out / "log.jsonl")
    export(model, arguments.out)


if __name__ == "__main__":
    main()
