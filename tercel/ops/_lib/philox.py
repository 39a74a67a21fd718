"""Random numbers as a function of (seed, position, stream): Philox 4x32-10 in int64 tensors.

No state is kept, so a row's numbers do not depend on the rows, steps or ranks around it.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Random123.
"""

import torch

ROUNDS = 10
_WORD = (1 << 32) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def uniform(
    seeds: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor
) -> torch.Tensor:
    """[S] fp64 in [0, 1), multiples of 2**-53, from [S] i64 seeds and positions.

    The key is the seed; the counter is (position, stream, 0). `stream` is 0 .. 2**32 - 1, one or
    [S] i64.
    """
    streams = torch.full_like(seeds, stream) if isinstance(stream, int) else stream
    rest = torch.stack((streams, torch.zeros_like(seeds)))
    words = philox(torch.cat((_halves(positions), rest)), _halves(seeds))
    return ((words[0] >> 5 << 26) | (words[1] >> 6)).double() * 2.0**-53


def gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, streams: torch.Tensor, first: int, count: int
) -> torch.Tensor:
    """[S, count] fp64: Gumbel noise of the ids first .. first + count - 1, whoever asks for them.

    -log(-log(u)) with u of 32 bits: word id % 4 of the counter (position, stream, id // 4).
    """
    start, end = first // 4, -(-(first + count) // 4)
    blocks = torch.arange(start, end, device=seeds.device)
    rows, columns = seeds.shape[0], end - start
    counter = torch.empty(4, rows, columns, dtype=torch.int64, device=seeds.device)
    counter[:2] = _halves(positions).unsqueeze(-1)
    counter[2] = streams.unsqueeze(-1)
    counter[3] = blocks
    key = _halves(seeds).unsqueeze(-1).expand(-1, -1, columns)
    words = philox(counter.flatten(1), key.reshape(2, -1)).view(4, rows, columns)
    noise = words.permute(1, 2, 0).flatten(1)[:, first - 4 * start :][:, :count]
    return noise.double().add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()


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
