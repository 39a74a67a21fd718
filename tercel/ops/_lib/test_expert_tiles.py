"""The packed form of the experts, unpacked by the description of its layout."""

import pytest
import torch

from tercel.core import mxfp4
from tercel.ops._lib.expert_tiles import MAGNITUDE_BITS, SIGN_BITS, Split, pack, packed_bytes

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def drawn(width, latent, experts=2):
    generator = torch.Generator().manual_seed(width + latent)

    def bits(*shape, low=0, high=256):
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    return (
        bits(experts, 2 * width, latent // 2),
        bits(experts, 2 * width, latent // 32, low=100, high=140),
        bits(experts, latent, width // 2),
        bits(experts, latent, width // 32, low=100, high=140),
    )


def unpacked(words, scales, depth):
    """[E, tiles, 16, depth] fp32."""
    split = Split(depth)
    scales = scales[..., None].view(torch.uint8)
    shifts = [
        bits[j] + 16 * h for bits in (MAGNITUDE_BITS, SIGN_BITS) for j in range(4) for h in (0, 1)
    ]
    magnitude, sign = torch.tensor(shifts).unflatten(0, (2, 8))
    values = MAGNITUDES[(words[..., None] >> magnitude) & 7]
    values = torch.where((words[..., None] >> sign & 1) == 1, -values, values)
    # [E, tiles, part, load, g, q, half, parity, element] -> [E, tiles, half, g, part, group, 32]
    values = values.unflatten(5, (2, 2)).unflatten(4, (8, 4)).permute(0, 1, 6, 4, 2, 3, 7, 5, 8)
    values = values.flatten(-2).flatten(5, 6)
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    powers = powers.unflatten(5, (2, 2)).unflatten(4, (8, 4))
    powers = powers.permute(0, 1, 6, 4, 2, 3, 5, 7).flatten(5, 7)
    held = split.groups_per_part
    rows = (values[..., :held, :] * powers[..., :held, None]).flatten(-3)
    assert bool((values[..., held:, :] == 0).all()), "padding is zero"
    return rows.flatten(2, 3)[..., :depth]


@pytest.mark.parametrize(
    ("width", "latent"), [(32, 32), (192, 64), (32, 480), (64, 704)], ids=lambda n: str(n)
)
def test_packed_mxfp4_is_what_was_packed(width, latent):
    w13, s13, w2, s2 = drawn(width, latent)
    words, scales, down_words, down_scales, *rest = pack(w13, s13, w2, s2, dtype=torch.bfloat16)
    assert rest == [None, None]
    gate_up = mxfp4.dequantize(w13, s13, torch.float32)
    tiles = unpacked(words, scales, latent)
    assert torch.equal(tiles[:, :, :8].flatten(1, 2), gate_up[:, :width])
    assert torch.equal(tiles[:, :, 8:].flatten(1, 2), gate_up[:, width:])
    down = unpacked(down_words, down_scales, width).flatten(1, 2)
    assert torch.equal(down, mxfp4.dequantize(w2, s2, torch.float32))


def test_a_wrong_tile_is_seen():
    """The unpacking above tells neighbouring rows, groups and elements apart."""
    weights = drawn(32, 128)
    words, scales, *_ = pack(*weights, dtype=torch.bfloat16)
    right = unpacked(words, scales, 128)
    for axis in (1, 3, 4, 5):
        assert not torch.equal(unpacked(words.flip(axis), scales, 128), right)
    assert not torch.equal(unpacked(words, scales.flip(4), 128), right)


def test_bytes_are_known_beforehand():
    weights = drawn(192, 64)
    packed = pack(*weights, dtype=torch.bfloat16)
    assert packed_bytes(*weights, dtype=torch.bfloat16) == sum(
        t.nbytes for t in packed if t is not None
    )


def test_bf16_stays_as_it_is():
    w13, w2 = torch.randn(2, 8, 4).bfloat16(), torch.randn(2, 4, 4).bfloat16()
    packed = pack(w13, None, w2, None, dtype=torch.bfloat16)
    assert packed[0] is w13 and packed[2] is w2 and packed[1] is None and packed[3] is None


@pytest.mark.parametrize(
    ("depth", "parts", "loads"), [(3584, 8, 7), (768, 2, 6), (192, 1, 3), (3072, 8, 6)]
)
def test_k3_is_dealt_without_padding(depth, parts, loads):
    split = Split(depth)
    assert (split.parts, split.loads) == (parts, loads)
    assert parts * loads * 64 == depth
