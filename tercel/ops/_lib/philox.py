"""Random numbers as a function of (seed, position, stream): Philox 4x32-10 in int64 tensors.

No state is kept, so a row's numbers do not depend on the rows, steps or ranks around it.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Random123.
"""

import torch

ROUNDS = 10
_WORD = (1 << 32) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """[S] fp64 in [0, 1), multiples of 2**-53, from [S] i64 seeds and positions.

    The key is the seed; the counter is (position, stream, 0). `stream` is 0 .. 2**32 - 1.
    """
    key, position = _halves(seeds), _halves(positions)
    rest = torch.stack((torch.full_like(seeds, stream), torch.zeros_like(seeds)))
    words = philox(torch.cat((position, rest)), key)
    return ((words[0] >> 5 << 26) | (words[1] >> 6)).double() * 2.0**-53


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[4, S] words of 32 bits from counter [4, S] and key [2, S]; every word in an i64."""
    device = counter.device
    # Constants are 0-d tensors: Python scalars would double the cost of each small call.
    word, half = (torch.full((), value, device=device) for value in (_WORD, 32))
    multipliers = _pair(_MULTIPLIERS, device)
    rounds = torch.arange(ROUNDS, device=device).view(-1, 1, 1)
    keys = (key + rounds * _pair(_WEYL, device)) & word
    multiplied, passed = counter[0::2], counter[1::2]
    for round_key in keys.unbind(0):
        product = (multiplied * multipliers).flip(0)  # wraps; only its 64 bits matter
        multiplied = (product >> half).bitwise_xor_(passed).bitwise_xor_(round_key)
        multiplied.bitwise_and_(word)
        passed = product.bitwise_and_(word)
    return torch.stack((multiplied, passed), 1).flatten(0, 1)


def _halves(value: torch.Tensor) -> torch.Tensor:
    """[2, S]: the low and the high word."""
    return torch.stack((value & _WORD, (value >> 32) & _WORD))


def _pair(values: tuple[int, int], device: torch.device) -> torch.Tensor:
    """[2, 1], made on the device: a copy from the host could not be captured into a graph."""
    return (torch.arange(2, device=device) * (values[1] - values[0]) + values[0]).view(2, 1)
