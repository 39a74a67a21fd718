import pytest
import torch

from tercel.core import fp8


def naive(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Element by element, from the definition."""
    rows, columns = weight.shape
    values = [
        [float(weight[i, j]) * float(scale[i // 128, 0, j // 128, 0]) for j in range(columns)]
        for i in range(rows)
    ]
    return torch.tensor(values)


@pytest.fixture(scope="module")
def stored():
    """A matrix of 3 x 2 blocks with edges, and scales that are all different."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scale = 0.1 + torch.rand(fp8.scale_shape(300, 200), generator=generator)
    assert scale.shape == (3, 1, 2, 1)
    return weight, scale


def test_dequantize(stored):
    assert torch.equal(fp8.dequantize(*stored), naive(*stored))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(128, 256), slice(0, 200)),
        (slice(100, 131), slice(0, 200)),
        (slice(0, 300), slice(50, 150)),
        (slice(7, 290, 9), slice(127, 129)),
    ],
    ids=["whole blocks", "off the boundary", "columns", "every ninth row"],
)
def test_any_part_is_that_part_of_the_whole(stored, rows, columns):
    weight, scale = stored
    part = fp8.dequantize(
        weight[rows, columns], scale, torch.arange(300)[rows], torch.arange(200)[columns]
    )
    assert torch.equal(part, fp8.dequantize(weight, scale)[rows, columns])


def test_quantize():
    w = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    w[:128, 128:] = 0
    weight, scale = fp8.quantize(w)
    assert weight.dtype == torch.float8_e4m3fn and scale.shape == (3, 1, 2, 1)
    assert weight.is_contiguous() and weight.shape == w.shape
    assert scale[1, 0, 0, 0] == w[128:256, :128].abs().max() / 448
    error = (fp8.dequantize(weight, scale) - w).abs()
    assert (error <= w.abs() / 16 + scale.max() * 2**-10).all()
    assert not error[:128, 128:].any()


def test_what_fp8_holds_comes_back(stored):
    weight = stored[0].clone()
    weight[::128, ::128] = 448.0  # the largest value in every block
    held = fp8.dequantize(weight, torch.full((3, 1, 2, 1), 0.25))
    assert torch.equal(fp8.dequantize(*fp8.quantize(held)), held)


def test_control_scales_read_transposed(stored):
    weight, scale = stored
    square = weight[:256], scale[:2]
    wrong = fp8.dequantize(square[0], square[1].transpose(0, 2).contiguous())
    assert not torch.allclose(wrong, naive(*square), rtol=0.05)
