import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_sequence,
    draw,
)
from tercel.ops.attention.mla_append import CONTRACT, mla_append
from tercel.ops.attention.mla_append.reference import mla_append as naive

CELL = CONTRACT.cells[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    """Every entry that is not written stays poison."""
    check_cell(mla_append, cell, mla_append.portable.name, dtype=dtype)


def test_sequence():
    check_sequence(mla_append, CONTRACT.cells[1], mla_append.portable.name, steps=4)


def test_replay():
    check_replay(mla_append, CELL, mla_append.portable.name)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(pages=a["pages"][:, :, :512]),
        lambda a: a.update(slot_mapping=a["slot_mapping"].int()),
        lambda a: a.update(kv_norm=torch.ones(600)),
        lambda a: a.update(latent=a["latent"].bfloat16()),
    ],
    ids=["no room for the key part", "int32 positions", "norm wider than the entry", "bf16"],
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
    def broken(latent, kv_norm, pages, slot_mapping, *, eps):
        wide = torch.cat((kv_norm, torch.ones(latent.shape[1] - kv_norm.shape[0])))
        naive(latent, wide, pages, slot_mapping, eps=eps)

    check_control(mla_append, CELL, broken)


def test_control_next_position():
    def broken(latent, kv_norm, pages, slot_mapping, *, eps):
        naive(latent, kv_norm, pages, (slot_mapping + 1) % (5 * 16), eps=eps)

    check_control(mla_append, CELL, broken)


def test_control_eps_of_the_other_norms():
    def broken(latent, kv_norm, pages, slot_mapping, *, eps):
        naive(latent, kv_norm, pages, slot_mapping, eps=1e-5)

    check_control(mla_append, CELL, broken)
