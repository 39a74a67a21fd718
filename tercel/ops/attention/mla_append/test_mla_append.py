import pytest
import torch

from tercel.contract import Implementation, Op
from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
    check_sequence,
)
from tercel.contract.draw import draw
from tercel.errors import CheckFailed
from tercel.ops.attention.mla_append import CONTRACT, mla_append
from tercel.ops.attention.mla_append.reference import mla_append as naive
from tests.interpreter import INTERPRETED, REASON

CELL, TOKEN, FP8 = CONTRACT.cells


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    """Every entry that is not written stays poison."""
    check_cell(mla_append, cell, mla_append.portable.name, dtype=dtype)


def test_sequence():
    check_sequence(mla_append, TOKEN, mla_append.portable.name, steps=4)


def test_replay():
    check_replay(mla_append, CELL, mla_append.portable.name)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(pages=a["pages"][:, :, :512]),
        lambda a: a.update(slot_mapping=a["slot_mapping"].int()),
        lambda a: a.update(kv_norm=torch.ones(600)),
        lambda a: a.update(latent=a["latent"].bfloat16()),
        lambda a: a.update(page_scale=torch.ones(1)),
    ],
    ids=["no room for the key part", "int32 slots", "norm wider than the entry", "bf16", "scale"],
)
def test_refuses(change):
    check_refusal(mla_append, CELL, mla_append.portable.name, change)


def test_padded_tokens_reach_the_sink_only():
    a = draw(mla_append, CELL, dtype=torch.float32)
    a["slot_mapping"] = torch.zeros_like(a["slot_mapping"])
    mla_append(**a)
    assert a["pages"][0, 0].isfinite().all() and a["pages"].flatten(0, 1)[1:].isnan().all()


def test_reads_nothing_on_the_host():
    check_meta(mla_append, CELL, mla_append.portable.name)


def test_control_key_part_normalised_with_the_latent():
    def broken(latent, kv_norm, pages, slot_mapping, *, eps, page_scale):
        wide = torch.cat((kv_norm, torch.ones(latent.shape[1] - kv_norm.shape[0])))
        naive(latent, wide, pages, slot_mapping, eps=eps)

    check_control(mla_append, CELL, broken)


def test_control_next_position():
    def broken(latent, kv_norm, pages, slot_mapping, *, eps, page_scale):
        naive(latent, kv_norm, pages, (slot_mapping + 1) % (5 * 16), eps=eps)

    check_control(mla_append, CELL, broken)


def test_control_eps_of_the_other_norms():
    def broken(latent, kv_norm, pages, slot_mapping, *, eps, page_scale):
        naive(latent, kv_norm, pages, slot_mapping, eps=1e-5)

    check_control(mla_append, CELL, broken)


def test_codes_saturate_and_nan_stays():
    a = draw(mla_append, FP8, dtype=torch.float32)
    a["latent"][0, 512:] = torch.tensor([1e9, -1e9, float("nan"), 0.0] * 16)
    for name in ("reference", *(["triton"] if INTERPRETED else [])):
        mla_append.using(name)(**a)
        codes = a["pages"].flatten(0, 1)[a["slot_mapping"][0], 512:516].float()
        torch.testing.assert_close(
            codes, torch.tensor([448.0, -448.0, float("nan"), 0.0]), equal_nan=True
        )


def test_control_codes_rounded_up():
    """Half a step of e4m3 is within the tolerance, not within the bits."""

    def broken(latent, kv_norm, pages, slot_mapping, *, eps, page_scale):
        options = {"eps": eps, "page_scale": page_scale * 0.97}
        naive(latent, kv_norm, pages, slot_mapping, **options)

    probe = Op(
        mla_append.__wrapped__,
        CONTRACT,
        (mla_append.implementation("reference"), Implementation("broken", broken)),
    )
    check_roundings(probe, FP8, "reference")
    with pytest.raises(CheckFailed, match="carry the reference's bits"):
        check_roundings(probe, FP8, "broken")


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
    def test_cells(self, cell, dtype):
        check_cell(mla_append, cell, "triton", dtype=dtype)

    @pytest.mark.parametrize("cell", [CELL, FP8], ids=str)
    def test_roundings(self, cell):
        check_roundings(mla_append, cell, "triton")

    def test_sequence(self):
        check_sequence(mla_append, TOKEN, "triton", steps=4)

    def test_replay(self):
        check_replay(mla_append, FP8, "triton", dtype=torch.bfloat16)
