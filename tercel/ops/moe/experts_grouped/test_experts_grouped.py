import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_refusal,
    check_replay,
    check_roundings,
)
from tercel.contract.check import packed as packed_arguments
from tercel.contract.draw import draw
from tercel.ops._lib import expert_tiles
from tercel.ops.moe.experts_grouped import CONTRACT, experts_grouped
from tercel.ops.moe.route_quantize.reference import route_quantize
from tests.interpreter import INTERPRETED, REASON

CELL = CONTRACT.cells[0]
NVFP4 = next(cell for cell in CONTRACT.cells if cell.get("nvfp4"))
PORTABLE = experts_grouped.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(experts_grouped, cell, PORTABLE, dtype=dtype)


def test_roundings():
    check_roundings(experts_grouped, CELL, PORTABLE)


def test_replay():
    check_replay(experts_grouped, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", ["reference", PORTABLE])
def test_ranks_of_experts_add_up(implementation):
    arguments = draw(experts_grouped, CONTRACT.cells[2], dtype=torch.float32)
    run = experts_grouped.implementation(implementation).run
    parts = []
    for first in (0, 2, 4):
        part = {name: arguments[name][first : first + 2] for name in ("w13", "w2")}
        parts.append(run(**{**arguments, **part, "first_expert": first}))
    torch.testing.assert_close(sum(parts), run(**arguments), rtol=0, atol=1e-5)


def test_packed_weights_are_the_exact_values():
    arguments = draw(experts_grouped, CELL, dtype=torch.bfloat16)
    implementation = experts_grouped.portable
    packed = implementation.pack(*(arguments[n] for n in CONTRACT.weights), dtype=torch.bfloat16)
    assert packed[1] is None and packed[3] is None
    byte, scale = int(arguments["w2"][3, 5, 7]), int(arguments["w2_scale"][3, 5, 0])
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for offset, code in enumerate((byte & 15, byte >> 4)):
        value = table[code & 7] * (-1.0 if code & 8 else 1.0) * 2.0 ** (scale - 127)
        assert float(packed[2][3, 5, 14 + offset]) == value
    unpacked = experts_grouped(**arguments)
    again = experts_grouped(**{**arguments, **dict(zip(CONTRACT.weights, packed, strict=True))})
    assert torch.equal(unpacked, again)


def test_packed_nvfp4_weights_are_the_values():
    arguments = draw(experts_grouped, NVFP4, dtype=torch.float32)
    names = CONTRACT.weights
    w13, _, w2, *rest = experts_grouped.portable.pack(
        *(arguments[name] for name in names), dtype=torch.float32
    )
    assert rest == [None, None, None]
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    half = w13.shape[1] // 2
    for packed, name, row, part in ((w13, "w13", 5, 0), (w13, "w13", half, 1), (w2, "w2", 5, 0)):
        byte = int(arguments[name][3, row, 13])
        scale = float(arguments[f"{name}_scale"][3, row, 26 // 16])
        scale_2 = float(arguments[f"{name}_scale_2"][3, part])
        for offset, code in enumerate((byte & 15, byte >> 4)):
            value = table[code & 7] * (-1.0 if code & 8 else 1.0) * scale * scale_2
            assert float(packed[3, row, 26 + offset]) == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(w13_scale=None),
        lambda a: a.update(w2_scale=a["w2_scale"][..., :-1].contiguous()),
        lambda a: a.update(w13=a["w13"][..., :-1].contiguous()),
        lambda a: a.update(ids=a["ids"].int()),
        lambda a: a.update(weights=a["weights"].bfloat16()),
        lambda a: a.update(activation="gelu"),
        lambda a: a.update(beta=None),
    ],
    ids=[
        "codes without scales",
        "scales too short",
        "codes too short",
        "i32 ids",
        "bf16 weights",
        "unknown activation",
        "situ without beta",
    ],
)
def test_refuses(change):
    check_refusal(experts_grouped, CELL, PORTABLE, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(w13_scale_2=None),
        lambda a: a.update(w13_scale_2=None, w2_scale_2=None),
        lambda a: a.update(w2_scale_2=a["w2_scale_2"].expand(-1, 2).contiguous()),
        lambda a: a.update(w2_scale=a["w2_scale"].view(torch.uint8)[..., ::2].contiguous()),
        lambda a: a.update(w2_scale=a["w2_scale"][..., ::2].contiguous()),
    ],
    ids=["no scale_2", "none at all", "two for w2", "w2 in MXFP4", "blocks of 32"],
)
def test_refuses_nvfp4(change):
    check_refusal(experts_grouped, NVFP4, PORTABLE, change)


def test_expert_twice_in_a_row_is_invalid():
    check_invalid(experts_grouped, CELL, lambda a: a["ids"][0].fill_(3))


def test_control_weight_before_the_activation():
    def broken(z, ids, weights, **rest):
        ones = torch.ones(len(z), 1)
        return sum(
            experts_grouped(
                z=z * weight[:, None], ids=expert[:, None].clone(), weights=ones, **rest
            )
            for expert, weight in zip(ids.unbind(1), weights.unbind(1), strict=True)
        )

    check_control(experts_grouped, CELL, broken)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda a: a.update(w13=a["w13"] << 4 | a["w13"] >> 4),
        lambda a: a.update(w13_scale_2=torch.ones_like(a["w13_scale_2"])),
        lambda a: a.update(w13_scale_2=a["w13_scale_2"].flip(1)),
    ],
    ids=["nibbles swapped", "scale_2 forgotten", "gate and up scale_2 swapped"],
)
def test_control_nvfp4(mistake):
    def broken(**arguments):
        mistake(arguments)
        return experts_grouped(**arguments)

    check_control(experts_grouped, NVFP4, broken)


SMALL = (
    Cell("local range", T=5, k=2, E=3, L=64, I=32, total=6, first=2, mxfp4=True),
    Cell("bf16 experts with SiLU, ragged", T=6, k=2, E=3, L=72, I=40, activation="silu"),
    Cell("no token on this rank", T=2, k=2, E=1, L=64, I=32, total=9, first=9, mxfp4=True),
    Cell("NVFP4", T=2, k=2, E=3, L=64, I=32, nvfp4=True),
)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """Interpreted: scales are applied in fp32 instead of by the packed product that a GPU runs."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.why)
    def test_cells(self, cell, dtype):
        check_cell(experts_grouped, cell, "triton", dtype=dtype)

    def test_two_warps_a_tile_and_padded_groups(self, monkeypatch):
        """As with a latent of more than 14 groups, at three."""
        monkeypatch.setattr(expert_tiles, "GROUPS_PER_WARP", 2)
        cell = Cell("three groups", T=2, k=2, E=2, L=96, I=32, mxfp4=True)
        check_cell(experts_grouped, cell, "triton", dtype=torch.bfloat16)

    def test_roundings(self):
        check_roundings(experts_grouped, SMALL[0], "triton")

    def test_replay(self):
        check_replay(experts_grouped, SMALL[1], "triton")

    def test_rows_do_not_depend_on_their_neighbours(self):
        arguments = draw(experts_grouped, SMALL[1], dtype=torch.bfloat16)
        run = experts_grouped.using("triton")
        before = run(**arguments)
        arguments["z"][1:] = 1e30
        arguments["ids"][1:] = arguments["ids"][1:].flip(1)
        assert torch.equal(run(**arguments)[0], before[0])

    def test_slots_are_sorted_by_expert_and_stay_in_order(self):
        from tercel.ops._lib.kernel_slots import sort

        generator = torch.Generator().manual_seed(0)
        ids = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(33)])
        slots = sort(ids, 2, 5, 8)
        for expert in range(5):
            expected = (ids.flatten() == expert + 2).nonzero().flatten().tolist()
            assert slots.lists[expert, : slots.counts[expert]].tolist() == expected

    def test_takes_the_routing_of_route_quantize(self):
        arguments = draw(experts_grouped, SMALL[0], dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        logits, bias = (torch.randn(n, generator=generator) for n in ((5, 6), (6,)))
        ids, weights, *_ = route_quantize(logits, bias, arguments["z"], top_k=2, scaling=2.5)
        routed = {**arguments, "ids": ids, "weights": weights}
        kernel = experts_grouped.implementation("triton")
        ours = kernel.run(**packed_arguments(experts_grouped, kernel, routed, torch.bfloat16))
        expected = experts_grouped(**routed)
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)
