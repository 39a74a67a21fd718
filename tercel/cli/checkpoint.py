"""`tercel checkpoint`: what a checkpoint holds, what it should hold, other formats, small ones."""

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tercel.cli.progress import loading_bar
from tercel.core.drafter_formats import read_drafter_config
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig, read_config_json
from tercel.errors import ConfigError
from tercel.runtime.tokenizer import (
    CLOSE,
    OPEN,
    RANK_FILE,
    SEP,
    Tokenizer,
    byte_tokens,
    write_rank_file,
)
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.conversion_plan import FORMATS
from tercel.weights.convert import convert_checkpoint
from tercel.weights.manifest import Manifest, account, family_of_checkpoint, manifest_from_config
from tercel.weights.problems import raise_problems
from tercel.weights.published import NAMES, TOTAL_BYTES, published_config
from tercel.weights.rank_manifest import RankManifest, rank_manifest
from tercel.weights.requantize import Exactness
from tercel.weights.shards import write_json
from tercel.weights.staging import staged
from tercel.weights.tiny import tiny_config
from tercel.weights.write import write_random_checkpoint

app = typer.Typer(
    help="Inspect, count, convert and make checkpoints.", no_args_is_help=True, add_completion=False
)

_SPECIAL_SLOTS = 256
_VOCAB_MULTIPLE = 16  # so that every layout up to sixteen ranks divides the vocabulary

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")], as_json: Json = False
) -> None:
    """Account for every tensor of a checkpoint, and list what is wrong with it."""
    config = ModelConfig.load(model)
    checkpoint = Checkpoint.open(model)
    manifest, problems = account(checkpoint, config)
    summary = {
        "model": str(model),
        "family": family_of_checkpoint(checkpoint).name,
        "shards": len(checkpoint.shards),
        **_summary(manifest),
        "problems": [asdict(problem) for problem in problems],
    }
    _show(summary, as_json)
    if problems and as_json:
        raise typer.Exit(1)
    raise_problems(model, problems)


@app.command()
def manifest(
    model: Annotated[
        str, typer.Option(help=f"{', '.join(NAMES)}, or a directory with a config.json.")
    ] = NAMES[0],
    layout: Annotated[
        str | None, typer.Option(help="Count what one rank of this layout reads of it.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="That rank.")] = 0,
    drafter: Annotated[
        Path | None, typer.Option(help="Also what the rank reads of this drafter; with --layout.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Compute the tensors of a published checkpoint from its configuration alone."""
    config = published_config(model) if model in NAMES else read_config_json(Path(model))
    if drafter is not None and layout is None:
        raise ConfigError("--drafter counts what a rank reads; name a --layout")
    if layout is not None:
        drafts = None if drafter is None else read_drafter_config(drafter)
        part = rank_manifest(config, Layout.parse(layout), rank, drafts)
        _show_rank(f"{model}, rank {rank} of {layout}", part, tensors, as_json)
        return
    computed = manifest_from_config(config)
    published = TOTAL_BYTES.get(model)
    summary: dict[str, Any] = {"model": model, **_summary(computed), "published_bytes": published}
    if tensors and as_json:
        summary["entries"] = [asdict(entry) for entry in computed.entries]
    _show(summary, as_json)
    if model in NAMES and not as_json:
        known = f"{published:,} bytes" if published else "not known, so nothing to compare with"
        typer.echo(f"published total: {known}")
    if tensors and not as_json:
        for entry in computed.entries:
            typer.echo(f"{entry.key} {entry.dtype} {list(entry.shape)} {entry.field or entry.part}")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    out: Annotated[Path, typer.Argument(help="Directory to create.")],
    to: Annotated[str, typer.Option(help=f"Format of the experts: {', '.join(FORMATS)}.")],
    fp8_attention: Annotated[
        bool,
        typer.Option(
            "--fp8-attention",
            help="With nvfp4: attention in FP8 too, as published. Loses about 3 % per weight.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with its experts in another format, and say what that lost."""
    with _ended_by_sigterm(), loading_bar("Converting") as progress:
        done = convert_checkpoint(source, out, to, fp8_attention=fp8_attention, progress=progress)
    summary = {"model": str(out), "source": str(source), "to": to, **asdict(done)}
    if as_json:
        typer.echo(json.dumps(summary))
        return
    typer.echo(f"{out}: {done.tensors:,} tensors, {done.num_bytes:,} bytes")
    typer.echo(f"unchanged: {done.copied_tensors:,} tensors, {done.copied_bytes:,} bytes")
    for each in done.exactness:
        typer.echo(f"{each.kind}, {each.source} to {each.target}: {_what_was_lost(each)}")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that what it began is removed."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _what_was_lost(exactness: Exactness) -> str:
    count = f"{exactness.matrices:,} matrices"
    if not exactness.inexact_values:
        return f"{count}, all {exactness.values:,} values exact"
    return (
        f"{count}, {exactness.inexact_matrices:,} of them not exact; "
        f"{exactness.inexact_values:,} of {exactness.values:,} values changed, by up to "
        f"{exactness.worst_error:.2%} of a matrix's largest; RMS up to "
        f"{exactness.worst_rms_error:.2%}"
    )


@app.command()
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Directory to create.")],
    family: Annotated[str, typer.Option(help="kimi_k3 or kimi_linear.")] = "kimi_k3",
    shards: Annotated[int, typer.Option(min=1, help="Number of safetensors files.")] = 2,
    size_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of tensors to come close to.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of the text model's config, e.g. num_experts=8."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a random checkpoint in the published format, tokenizer included."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out: {out} exists and is not an empty directory; choose another")
    tokens = byte_tokens()
    vocab_size = (len(tokens) + _SPECIAL_SLOTS) // _VOCAB_MULTIPLE * _VOCAB_MULTIPLE
    config = tiny_config(family, vocab_size, size_bytes=size_bytes, changes=_parse(changes or []))
    out.parent.mkdir(parents=True, exist_ok=True)
    with _ended_by_sigterm(), staged(out, "making a checkpoint") as staging:
        write_random_checkpoint(staging, config, num_shards=shards, seed=seed)
        _write_tokenizer(staging, tokens[: vocab_size - _SPECIAL_SLOTS])
    _show({"model": str(out), **_summary(manifest_from_config(config))}, as_json)


def _parse(changes: list[str]) -> dict[str, Any]:
    parsed = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change}: expected KEY=VALUE")
        try:
            parsed[key] = json.loads(value)
        except json.JSONDecodeError:
            parsed[key] = value
    return parsed


def _write_tokenizer(out: Path, tokens: list[bytes]) -> None:
    write_rank_file(out / RANK_FILE, tokens)
    tokenizer = Tokenizer(tokens)
    ordinary = {OPEN, CLOSE, SEP}  # published as added tokens that are not special
    slots = range(tokenizer.num_base_tokens, tokenizer.vocab_size)
    added = {slot: tokenizer.decode([slot]) for slot in slots}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": added[tokenizer.bos_id],
        "eos_token": added[tokenizer.eos_id],
        "pad_token": added[tokenizer.pad_id],
        "unk_token": added[tokenizer.unk_id],
        "added_tokens_decoder": {
            str(slot): {"content": name, "special": name not in ordinary}
            for slot, name in added.items()
        },
    }
    write_json(out / "tokenizer_config.json", config)


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "tensors": manifest.num_tensors,
        "bytes": manifest.num_bytes,
        "by_dtype": manifest.by("dtype"),
        "by_part": manifest.by("part"),
    }


def _show_rank(name: str, part: RankManifest, tensors: bool, as_json: bool) -> None:
    summary = {
        "model": name,
        "layers": [part.layers.start, part.layers.stop],
        "tensors": part.num_tensors,
        "bytes": part.num_bytes,
        "by_sharing": part.by("sharing"),
        "by_dtype": part.by("dtype"),
        "by_part": part.by("group"),
    }
    if tensors and as_json:
        summary["entries"] = [asdict(entry) for entry in part.entries]
    _show(summary, as_json)
    if tensors and not as_json:
        for entry in part.entries:
            count = f" x {entry.num_tensors}" if entry.num_tensors > 1 else ""
            typer.echo(f"{entry.key}{count} {entry.num_bytes:,} bytes {entry.field}")


def _show(summary: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
        return
    console = Console()
    console.print(f"[bold]{summary['model']}[/bold]")
    table = Table("", "tensors", "bytes", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    kinds = ("by_part", "by_dtype", "by_sharing")
    groups = {name: group for kind in kinds for name, group in summary.get(kind, {}).items()}
    groups["total"] = summary
    for name, group in groups.items():
        table.add_row(name, f"{group['tensors']:,}", f"{group['bytes']:,}")
    console.print(table)
