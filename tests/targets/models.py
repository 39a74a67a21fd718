"""One tiny random checkpoint per family, as a program and as the reference."""

import atexit
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file

from tercel.config import EngineConfig
from tercel.core.arch import Arch
from tercel.core.drafting import Taps
from tercel.core.group import Group, Groups
from tercel.core.inputs import build_inputs
from tercel.core.model import ModelConfig, read_config_json
from tercel.core.step import Row, StepPlan, classify
from tercel.parallel import SingleGroup
from tercel.reference.kimi_k3 import Config, Model
from tercel.reference.weights import load_checkpoint_tensors
from tercel.targets.load import Plan, resolve
from tercel.targets.program import Program
from tercel.targets.state import CacheSizes, create_cache
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.convert import convert_checkpoint
from tercel.weights.load import load_model
from tercel.weights.tiny import tiny_config
from tercel.weights.write import write_random_checkpoint

FAMILIES = ("kimi_k3", "kimi_linear")
PAGE = 8


@cache
def checkpoint(family: str) -> Path:
    """Written once per test session and removed with it; `kimi_k3 as bf16` converts it, and a
    directory stands for itself."""
    if Path(family).is_dir():
        return Path(family)
    directory = Path(mkdtemp(prefix="tercel-tests-"))
    atexit.register(shutil.rmtree, directory)
    family, _, form = family.partition(" as ")
    if form:
        convert_checkpoint(checkpoint(family), directory, form)
        return directory
    write_random_checkpoint(directory, tiny_config(family, vocab_size=256))
    return directory


@cache
def reference(family: str) -> Model:
    """The oracle with the checkpoint's weights, in fp64: the more accurate side."""
    return reference_in(family, torch.float64)


def reference_in(family: str, dtype: torch.dtype) -> Model:
    path = checkpoint(family)
    model = Model(Config.from_dict(read_config_json(path))).to(dtype).eval()
    load_checkpoint_tensors(model, tensors_of(path))
    return model


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {key: x for shard in path.glob("*.safetensors") for key, x in load_file(shard).items()}


@torch.inference_mode()
def expected(family: str, tokens: Sequence[int]) -> torch.Tensor:
    """[T, V] logits of every position."""
    return reference(family)(torch.tensor([tokens]))[0]


def resolved(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Plan:
    """`options` are layout, rank and fields of EngineConfig."""
    return _resolved(family, dtype, **options)


def program(family: str, dtype: torch.dtype = torch.float32) -> Program:
    return _program(family, dtype)


@cache
def _resolved(
    family: str, dtype: torch.dtype, layout: str = "tp1", rank: int = 0, **options: Any
) -> Plan:
    config = EngineConfig(model=family, page_size=PAGE, layout=layout, **options)
    model = ModelConfig.load(checkpoint(family))
    return resolve(model, config, arch=Arch.CPU, dtype=dtype, rank=rank)


@cache
def _program(family: str, dtype: torch.dtype) -> Program:
    return load_program(resolved(family, dtype), family, SingleGroup())


def load_program(plan: Plan, family: str, world: Group) -> Program:
    weights = load_model(
        Checkpoint.open(checkpoint(family)),
        plan.place.model,
        plan.place.layout,
        plan.place.rank,
        dtype=plan.dtype,
        device=torch.device("cpu"),
        packs=plan.packs(),
    )
    return plan.program(weights, Groups.of(world, plan.place.layout))


@dataclass
class Session:
    """Requests run step by step on one program; pages are handed out from the top down so that
    block tables are not in order."""

    family: str
    max_draft: int = 0
    dtype: torch.dtype = torch.float32
    requests: dict[str, int] = field(default_factory=dict)
    """Context length per request."""

    program: Program | None = None
    """None: the whole model on one rank."""
    taps: Taps | None = None
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        self.program = self.program or program(self.family, self.dtype)
        self.cache = create_cache(
            self.program.place,
            self.program.groups.world,
            sizes=CacheSizes(64, PAGE, 9, self.max_draft),
            dtype=self.dtype,
            device=torch.device("cpu"),
            kv_dtype=self.kv_dtype,
        )
        self._pages: dict[str, list[int]] = {}
        self._free = list(range(1, 64))
        self._slots: dict[str, int] = {}

    def row(self, name: str, tokens: Sequence[int], pending: int = 0) -> Row:
        """The next `tokens` of request `name`."""
        start = self.requests.setdefault(name, 0)
        slot = self._slots.setdefault(name, 8 - len(self._slots))
        pages = self._pages.setdefault(name, [])
        while len(pages) * PAGE < start + len(tokens):
            pages.append(self._free.pop())
        return Row(name, tuple(tokens), start, slot, tuple(pages), pending=pending)

    @torch.inference_mode()
    def step(
        self,
        prefill: dict[str, Sequence[int]] | None = None,
        decode: dict[str, Sequence[int]] | None = None,
        *,
        pending: dict[str, int] | None = None,
        accept: dict[str, int] | None = None,
    ) -> torch.Tensor:
        """Logits of the last token of each prefill row and of every decode token (of this rank's
        vocabulary; None before the last pipeline stage). `accept` says how many of a row's tokens
        count; the rest were rejected drafts."""
        rows = [self.row(name, tokens) for name, tokens in (prefill or {}).items()]
        held = pending or {}
        verify = [
            self.row(name, tokens, held.get(name, 0)) for name, tokens in (decode or {}).items()
        ]
        plan = StepPlan(tuple(rows), tuple(verify))
        inputs = build_inputs(plan, page_size=PAGE, device=torch.device("cpu"))
        limits = self.program.row.limits
        logits = self.program.run(inputs, self.cache, classify(plan, limits), self.taps)
        for row in plan.rows:
            kept = (accept or {}).get(row.request_id, row.num_tokens)
            self.requests[row.request_id] += kept
        return logits


def tokens(count: int, seed: int, family: str) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = resolved(family).place.model.vocab_size
    return torch.randint(0, vocabulary, (count,), generator=generator).tolist()


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual.double() - wanted).abs().max() / wanted.abs().max())
