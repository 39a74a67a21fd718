"""What every rank has to agree on before it reads weights."""

import platform
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch

import tercel
from tercel.config import EngineConfig
from tercel.runtime.checkpoint import Opened
from tercel.runtime.tokenizer import RANK_FILE
from tercel.targets.load import Plan
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.fingerprint import file_hash, fingerprint

_PER_RANK = ("model", "num_threads")
"""Fields of the configuration that may differ: where a host keeps its files, how many cores it
has."""


def report_of(opened: Opened, plan: Plan) -> dict[str, str]:
    """This rank's side of the comparison; `plan` is what it runs itself."""
    config, model_dir = opened.config, Path(opened.config.model)
    settings = {
        f"config.{name}": str(value)
        for name, value in asdict(config).items()
        if name not in _PER_RANK
    }
    return {
        **settings,
        "tercel": f"{tercel.__version__} {_source_hash()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": _device_name(opened.device),
        "model config": file_hash(model_dir / "config.json")[:16],
        "tokenizer": _tokenizer(model_dir / RANK_FILE),
        "checkpoint": _checkpoint(config),
        "program": _program(opened, plan)[:16],
    }


def _program(opened: Opened, plan: Plan) -> str:
    """The hash of what all ranks run: the ranks of a pipeline stage run the same program."""
    layout, own_stage = plan.place.layout, plan.place.rank // plan.place.layout.tp
    stages = [
        plan.digest if stage == own_stage else opened.plan(stage * layout.tp).digest
        for stage in range(layout.pp)
    ]
    return sha256(" ".join(stages).encode()).hexdigest()


def _tokenizer(path: Path) -> str:
    return file_hash(path)[:16] if path.exists() else "bytes"


def _checkpoint(config: EngineConfig) -> str:
    if config.load_format == "dummy":
        return "dummy"
    return fingerprint(Checkpoint.open(config.model))[:16]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _source_hash() -> str:
    """Of this package's modules, so that a rank with other code is seen."""
    root = Path(tercel.__file__).parent
    return file_hash(*sorted(root.rglob("*.py")))[:16]
