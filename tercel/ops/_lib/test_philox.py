import pytest
import torch

from tercel.ops._lib.philox import philox, uniform

# The known-answer vectors of Random123 for philox4x32 with ten rounds: counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return torch.tensor([int(word, 16) for word in text.split()]).unsqueeze(1)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    assert torch.equal(philox(words(counter), words(key)), words(result))


def test_rows_are_independent():
    counters, keys, results = (torch.cat([words(row[i]) for row in KNOWN], 1) for i in range(3))
    assert torch.equal(philox(counters, keys), results)


def test_uniform_is_the_first_two_words():
    seed, position, stream = -7, (3 << 32) + 5, 11
    draw = uniform(torch.tensor([seed]), torch.tensor([position]), stream)
    mask = (1 << 32) - 1
    counter = torch.tensor([[5], [3], [stream], [0]])
    high, low, _, _ = philox(counter, torch.tensor([[seed & mask], [(seed >> 32) & mask]]))
    assert float(draw) == ((int(high) >> 5) * 2**26 + (int(low) >> 6)) / 2**53


def test_uniform_fills_the_unit_interval():
    draws = uniform(torch.full((20000,), 1), torch.arange(20000), 0)
    assert draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws, 16, 0, 1)
    assert float((counts - 1250).square().sum() / 1250) < 37.7  # 99.9 % of chi-square, 15 degrees


def test_seed_position_and_stream_each_change_the_number():
    zero, one = torch.tensor([0]), torch.tensor([1])
    draws = {
        float(uniform(*arguments))
        for arguments in [(zero, zero, 0), (one, zero, 0), (zero, one, 0), (zero, zero, 1)]
    }
    assert len(draws) == 4
