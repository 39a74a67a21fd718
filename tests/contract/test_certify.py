"""Certification end to end, on a CPU: cells, time, bundle, import. Kernels run interpreted."""

import pickle
import time
from dataclasses import replace

import msgspec
import pytest
import torch

from tercel import cli
from tercel.cli import kernels
from tercel.cli.kernels import time_line
from tercel.contract import Cell, bench, certify, jobs, receipt
from tercel.contract.bench import Bench, Goal, time_cell
from tercel.contract.certify import Certification
from tercel.contract.goals import goal_us, roof_us
from tercel.contract.jobs import CheckJob, Subject, TimeJob, with_peers
from tercel.contract.receipt import (
    Ceilings,
    CellTime,
    Status,
    receipts_of,
    status,
    write_receipts,
)
from tercel.contract.workers import Done
from tercel.core.arch import Arch
from tercel.errors import CheckFailed, TercelError
from tercel.ops.catalog import catalog
from tercel.ops.norm.add_rms_norm import add_rms_norm

CELL = Cell("small", T=2, N=64)
CEILINGS = Ceilings(1e9, 1e9, 1e12)
SUBJECT = Subject.of(add_rms_norm, "portable")


def slow(**arguments):
    torch.linspace(0, 1, 1 << 17).sin()


def absent(**arguments):
    raise ModuleNotFoundError(name="falconry")


def wrong(**arguments):
    raise RuntimeError("no such shape")


def present(**arguments):
    return lambda: slow(**arguments)


BENCH = Bench(
    cells=(CELL,),
    baselines={"slow": slow},
    peers={"absent": absent, "wrong": wrong, "present": present},
    goals=(Goal(3.0, T=1), Goal("best peer", N=64), Goal(5.0)),
)


def one_by_one(function, these, *, processes, deadline):
    """run_jobs in this process."""
    for job in these:
        if time.monotonic() >= deadline:
            yield Done(job, problem="no time was left", was_reached=False)
            continue
        try:
            yield Done(job, function(job))
        except TercelError as error:
            yield Done(job, problem=str(error))
        except Exception as error:
            yield Done(job, problem=f"{type(error).__name__}: {error}")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in (bench, certify, jobs, kernels):
        monkeypatch.setattr(module, "bench_of", lambda op: BENCH)
    monkeypatch.setattr(bench, "ROUNDS", (2, 2))
    monkeypatch.setattr(jobs, "run_jobs", one_by_one)


@pytest.fixture
def bundle(monkeypatch, tmp_path):
    """A certified portable op, and a folder that stands for the op's."""
    monkeypatch.setattr(receipt, "receipts_path", lambda op: tmp_path / "receipts.json")
    file = tmp_path / "bundle.json"
    file.write_bytes(msgspec.json.encode([certified()]))
    return file


def certification(**options):
    return Certification([SUBJECT], Arch.CPU, CEILINGS, device="cpu", **options)


def certified():
    run = certification()
    (verdict,) = run.check()
    (verdict,) = run.time([verdict])
    return run.receipt(verdict)


def test_receipt_says_what_was_found():
    found = certified()
    assert [cell.cell for cell in found.cells][-1] == str(CELL)
    assert len(found.cells) == len(add_rms_norm.contract.cells) + 1
    cell = found.cells[-1]
    assert 0 < cell.time.low_us <= cell.time.median_us <= cell.time.high_us
    assert cell.time.median_us < cell.time.baselines_us["slow"]
    assert cell.time.bytes > 2 * 64 * 2
    assert list(cell.errors) == list(add_rms_norm.contract.returns)
    assert all(0 < error.share <= 1 for error in cell.errors.values())
    assert all(each.time is None for each in found.cells[:-1])


def test_peers_that_are_absent_or_fail_are_not_run():
    (job,) = with_peers([TimeJob(SUBJECT, CELL, "cpu")], 1, time.monotonic() + 60)
    timed = job.run()
    assert list(timed.peers_us) == ["present"]
    assert timed.not_run == {
        "absent": "falconry is not installed",
        "wrong": "RuntimeError: no such shape",
    }
    assert "absent not run" in time_line(add_rms_norm, CELL, timed, CEILINGS)


def test_peers_that_nobody_asked_for():
    timed = time_cell(add_rms_norm, CELL, "portable", device="cpu", rounds=(2, 2))
    assert timed.not_run == dict.fromkeys(("absent", "wrong", "present"), "not asked for")


def test_goals():
    timed = CellTime(2.0, 1.9, 2.1, bytes=1000, flops=10**7, peers_us={"a": 3.0, "b": 2.5})
    goals = [BENCH.goal_of(Cell("", T=t, N=n)) for t, n in ((1, 64), (2, 64), (2, 32))]
    assert goals == [3.0, "best peer", 5.0]
    assert [goal_us(goal, timed, CEILINGS) for goal in goals] == [3.0, 2.5, 5.0]
    assert goal_us("best peer", CellTime(2.0, 1.9, 2.1, 1000, 0), CEILINGS) is None
    assert goal_us(None, timed, CEILINGS) == pytest.approx(3.0)
    stream = CellTime(2.0, 1.9, 2.1, bytes=85_000_000, flops=0)
    assert goal_us(None, stream, CEILINGS) == pytest.approx(1e5)
    assert roof_us(timed, CEILINGS) == pytest.approx(10.0)


def test_a_wrong_cell_is_a_problem_and_no_receipt(monkeypatch):
    def broken(job):
        if job.cell is CELL:
            raise CheckFailed("wrong")
        return {}

    monkeypatch.setattr(CheckJob, "run", broken)
    (verdict,) = certification().check()
    assert verdict.problems == {str(CELL): "wrong"}
    assert not verdict.is_right


def test_checked_and_not_timed_is_certified_without_times():
    run = certification(seconds=0.0)
    (verdict,) = run.check()
    assert not verdict.problems and not verdict.is_right
    assert verdict.unreached == len(SUBJECT.cells())
    (verdict,) = certification().check()
    (verdict,) = run.time([verdict])
    assert "no time was left" in verdict.problems[str(CELL)]
    assert all(cell.time is None for cell in run.receipt(verdict).cells)


def test_a_cell_that_fails_beside_peers_is_timed_without(monkeypatch):
    def timed(job):
        if job.peers:
            raise CheckFailed("a peer broke the device")
        return CellTime(1.0, 1.0, 1.0, 1, 1, not_run=job.not_run)

    monkeypatch.setattr(TimeJob, "run", timed)
    run = certification(peers=True)
    (verdict,) = run.check()
    (verdict,) = run.time([verdict])
    found = verdict.times[str(CELL)]
    assert found.median_us == 1.0
    assert found.not_run["present"] == "failed beside this kernel: a peer broke the device"
    assert found.not_run["absent"] == "falconry is not installed"


def test_long_cells_are_checked_once_beside_the_portable_form(monkeypatch):
    long = Cell("long", T=3, N=64)
    monkeypatch.setattr(jobs, "bench_of", lambda op: Bench(cells=(CELL,), long=(long,)))
    calls = []
    portable = add_rms_norm.portable

    def counted(*args, **kwargs):
        calls.append(args)
        return portable.run(*args, **kwargs)

    monkeypatch.setitem(add_rms_norm.implementations, "portable", replace(portable, run=counted))
    assert set(CheckJob(SUBJECT, long, "cpu").run()) == set(add_rms_norm.contract.returns)
    assert len(calls) == 2  # as itself and as the reference
    assert str(long) in map(str, SUBJECT.cells())


def test_a_job_travels():
    job = CheckJob(SUBJECT, CELL, "cpu")
    arrived = pickle.loads(pickle.dumps(job))
    assert arrived.run() == job.run()


def test_names_of_ops_are_whole_in_80_columns(capsys, monkeypatch):
    monkeypatch.setattr("tercel.cli.ops.status", lambda *_: Status.CERTIFIED)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["ops"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in catalog())


def test_import_certifies_until_the_source_changes(bundle, monkeypatch):
    assert status(add_rms_norm, "portable", Arch.CPU) == Status.UNTESTED
    assert cli.main(["ops", "import", str(bundle)]) == 0
    assert status(add_rms_norm, "portable", Arch.CPU) == Status.CERTIFIED
    monkeypatch.setattr(receipt, "content_hash", lambda op, implementation: "changed")
    assert status(add_rms_norm, "portable", Arch.CPU) == Status.STALE


def test_import_refuses_other_source_and_keeps_nothing(bundle, capsys):
    held = msgspec.json.decode(bundle.read_bytes())
    held[0]["content_hash"] = "0" * 64
    bundle.write_bytes(msgspec.json.encode(held))
    assert cli.main(["ops", "import", str(bundle)]) == 1
    assert "other source" in capsys.readouterr().err
    assert receipts_of(add_rms_norm) == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("", "not a whole bundle"),
        ('[{"op": ', "not a whole bundle"),
        ("{}", "not a whole bundle"),
        ("[]", "no kernel was certified"),
    ],
)
def test_import_refuses_what_is_no_bundle(content, said, tmp_path, capsys):
    file = tmp_path / "bundle.json"
    if content is not None:
        file.write_text(content)
    assert cli.main(["ops", "import", str(file)]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count(str(file)) == 1 and "`tercel certify --out`" in error


@pytest.mark.parametrize(
    "command",
    [
        ["ops", "--only", "nosuch"],
        ["bench", "nosuch"],
        ["certify", "nosuch", "--out", "bundle.json"],
        ["certify", "rms_norm", "--out", "nosuch/bundle.json"],
    ],
)
def test_what_matches_nothing_is_said_first(command, capsys):
    assert cli.main(command) == 1
    assert "nosuch" in capsys.readouterr().err


def test_a_receipt_replaces_its_predecessor_only(bundle):
    first = certified()
    write_receipts(add_rms_norm, [first, msgspec.structs.replace(first, arch=Arch.SM_90)])
    write_receipts(add_rms_norm, [msgspec.structs.replace(first, date="later")])
    assert [(r.arch, r.date) for r in receipts_of(add_rms_norm)] == [
        (Arch.CPU, "later"),
        (Arch.SM_90, first.date),
    ]


@pytest.mark.parametrize("command", [["certify", "--out", "bundle.json"], ["bench"]])
def test_needs_a_gpu(command, capsys, monkeypatch, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 1
    assert "no GPU" in capsys.readouterr().err
