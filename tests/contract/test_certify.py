"""Certification end to end, on a CPU: cells, time, bundle, import. Kernels run interpreted."""

import msgspec
import pytest
import torch

from tercel import cli
from tercel.contract import Cell, certify, receipt
from tercel.contract.certify import Bench
from tercel.contract.receipt import Status, receipts_of, status, write_receipts
from tercel.core.arch import Arch
from tercel.errors import CheckFailed
from tercel.ops.norm.add_rms_norm import add_rms_norm

CELL = Cell("small", T=2, N=64)


@pytest.fixture
def bundle(monkeypatch, tmp_path):
    """A certified portable op, and a folder that stands for the op's."""
    monkeypatch.setattr(certify, "bench_of", lambda op: BENCH)
    monkeypatch.setattr(receipt, "receipts_path", lambda op: tmp_path / "receipts.json")
    file = tmp_path / "bundle.json"
    file.write_bytes(msgspec.json.encode([certified()]))
    return file


def slow(**arguments):
    torch.linspace(0, 1, 1 << 17).sin()


BENCH = Bench(cells=(CELL,), baselines={"slow": slow})


def certified():
    return certify.certify(
        add_rms_norm, "portable", Arch.CPU, copy_bytes_per_s=1e9, device="cpu", rounds=2
    )


def test_receipt_says_what_was_found(bundle):
    found = certified()
    assert [cell.cell for cell in found.cells][-1] == str(CELL)
    assert len(found.cells) == len(add_rms_norm.contract.cells) + 1
    timed = found.cells[-1]
    assert 0 < timed.low_us <= timed.median_us <= timed.high_us
    assert timed.median_us < timed.baselines_us["slow"]
    assert timed.bytes > 2 * 64 * 2
    assert all(cell.median_us is None for cell in found.cells[:-1])


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


def test_import_refuses_what_is_no_bundle(bundle, capsys):
    bundle.write_text("{}")
    assert cli.main(["ops", "import", str(bundle)]) == 1
    assert "not a bundle" in capsys.readouterr().err


def test_a_receipt_replaces_its_predecessor_only(bundle):
    first = certified()
    write_receipts(add_rms_norm, [first, msgspec.structs.replace(first, arch=Arch.SM_90)])
    write_receipts(add_rms_norm, [msgspec.structs.replace(first, date="later")])
    assert [(r.arch, r.date) for r in receipts_of(add_rms_norm)] == [
        (Arch.CPU, "later"),
        (Arch.SM_90, first.date),
    ]


def test_a_wrong_cell_ends_it(bundle, monkeypatch):
    def broken(*args, **kwargs):
        raise CheckFailed("wrong")

    monkeypatch.setattr(certify, "check_cell", broken)
    with pytest.raises(CheckFailed):
        certified()


def test_certify_needs_a_gpu(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["certify", "--out", str(tmp_path / "bundle.json")]) == 1
    assert "no GPU" in capsys.readouterr().err
