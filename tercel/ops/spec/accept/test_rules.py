"""Every rule is lossless: exact enumeration of what comes out, over tables p and q of a toy."""

import itertools

import pytest
import torch

from tercel.ops.spec.accept.rules import RULES, count_matches

V, G = 3, 3
LENGTH = G + 1
PREFIXES = [prefix for n in range(LENGTH) for prefix in itertools.product(range(V), repeat=n)]
SEQUENCES = list(itertools.product(range(V), repeat=LENGTH))


def tables(seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    """A distribution of the next token after every prefix."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(len(PREFIXES), V, generator=generator, dtype=torch.float64) ** 2
    return {prefix: row / row.sum() for prefix, row in zip(PREFIXES, rows, strict=True)}


TARGET = tables(0)
DRAFTERS = {
    "another model": tables(1),
    "the target itself": TARGET,
    "certain of token 2": {prefix: torch.eye(V, dtype=torch.float64)[2] for prefix in PREFIXES},
    "drafts one token": {
        prefix: row if not prefix else torch.zeros(V, dtype=torch.float64)
        for prefix, row in tables(2).items()
    },
}


def law(table: dict[tuple[int, ...], torch.Tensor], sequence: tuple[int, ...]) -> float:
    """How likely `table` is to draw `sequence`, token by token."""
    result = 1.0
    for n, token in enumerate(sequence):
        result *= float(table[sequence[:n]][token])
    return result


def drafted(drafter) -> list[tuple[tuple[int, ...], float]]:
    """Every block and its probability; past a row of zeros the tokens are arbitrary."""
    blocks = []
    for block in itertools.product(range(V), repeat=G):
        probability = 1.0
        for n, token in enumerate(block):
            row = drafter[block[:n]]
            probability *= float(row[token]) if row.any() else float(token == 0)
        if probability:
            blocks.append((block, probability))
    return blocks


def rounds(rule, drafter):
    """(kept drafts and the masses of the token after them, probability) of every outcome."""
    for block, probability in drafted(drafter):
        drafts = list(block)
        p = torch.stack([TARGET[block[:n]] for n in range(LENGTH)])
        q = torch.stack([drafter[block[:n]] for n in range(G)])
        thresholds = rule.thresholds(p, q, drafts)
        for below in itertools.product((True, False), repeat=G):
            # The rule sees the uniform numbers by which side of the thresholds they lie on.
            chance, u = probability, []
            for is_below, h in zip(below, thresholds, strict=True):
                chance *= h if is_below else 1 - h
                u.append(h / 2 if is_below else (1 + h) / 2)
            if chance:
                accepted = rule.accepted(thresholds, u)
                residual = rule.residual(p, q, drafts, accepted)
                yield block[:accepted], residual / residual.sum(), chance


def output_law(rule, drafter) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of the first g + 1 tokens, a round's output and then the target alone; and the mean
    number of drafts kept."""
    result = dict.fromkeys(SEQUENCES, 0.0)
    mean = 0.0
    for kept, residual, chance in rounds(rule, drafter):
        mean += chance * len(kept)
        for token, share in enumerate(residual.tolist()):
            start = (*kept, token)
            for rest in itertools.product(range(V), repeat=LENGTH - len(start)):
                sequence = start + rest
                after = law(TARGET, sequence) / law(TARGET, start)
                result[sequence] += chance * share * after
    return result, mean


def distance(result: dict[tuple[int, ...], float]) -> float:
    return max(abs(result[sequence] - law(TARGET, sequence)) for sequence in SEQUENCES)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("name", RULES)
def test_lossless(name, drafter):
    result, _ = output_law(RULES[name], drafter)
    assert distance(result) < 1e-15


def test_block_verification_keeps_more():
    kept = {name: output_law(rule, DRAFTERS["another model"])[1] for name, rule in RULES.items()}
    assert kept["block"] > kept["token"] > 0.5
    for rule in RULES.values():
        assert output_law(rule, TARGET)[1] == pytest.approx(G)
        assert output_law(rule, DRAFTERS["drafts one token"])[1] < 1


def test_sample_match_is_lossless_for_any_drafts():
    """The output is the target's own draws, of which the drafts decide how many come out."""
    for block in itertools.product(range(V), repeat=G):
        result = dict.fromkeys(SEQUENCES, 0.0)
        for own in itertools.product(range(V), repeat=LENGTH):
            # own[n] is drawn after drafts[:n]; it counts as far as those are its predecessors.
            chance = 1.0
            for n, token in enumerate(own):
                chance *= float(TARGET[block[:n]][token])
            accepted = count_matches(list(own), list(block))
            start = (*block[:accepted], own[accepted])
            for rest in itertools.product(range(V), repeat=LENGTH - len(start)):
                result[start + rest] += chance * law(TARGET, start + rest) / law(TARGET, start)
        assert distance(result) < 1e-15


@pytest.mark.parametrize("name", RULES)
def test_control_the_token_drawn_from_the_target_is_not_lossless(name):
    broken = RULES[name]._replace(residual=lambda p, q, drafts, accepted: p[accepted])
    assert distance(output_law(broken, DRAFTERS["another model"])[0]) > 0.01


def test_control_one_rule_with_the_others_thresholds_is_not_lossless():
    token, block = RULES["token"], RULES["block"]
    broken = block._replace(thresholds=token.thresholds)
    assert distance(output_law(broken, DRAFTERS["another model"])[0]) > 0.01


def pieces(*cuts: float) -> list[tuple[float, float]]:
    """(middle, width) of the intervals that the cuts divide the unit interval into."""
    edges = sorted({0.0, 1.0, *cuts})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)]


def second_token(first: int, u: float | None) -> torch.Tensor:
    """[V] the law of the token after `first` in a round of token rejection with one draft, whose
    number is u, or its own where None."""
    p, q = TARGET[first,], DRAFTERS["another model"][first,]
    threshold = (p / q).clamp_max(1)
    kept = threshold if u is None else (u < threshold).double()
    over = (p - q).clamp_min(0)
    return q * kept + (q * (1 - kept)).sum() * over / over.sum()


def two_rounds(rule, fresh: bool) -> float:
    """How far the law of two tokens is from the target's when a rejected round of two drafts is
    followed by one whose first draft has a number of its own, or that of the position before."""
    drafter = DRAFTERS["another model"]
    result = dict.fromkeys(itertools.product(range(V), repeat=2), 0.0)
    later = [float(TARGET[a,][b] / drafter[a,][b]) for a in range(V) for b in range(V)]
    for block in itertools.product(range(V), repeat=2):
        p = torch.stack([TARGET[block[:n]] for n in range(3)])
        q = torch.stack([drafter[block[:n]] for n in range(2)])
        h = rule.thresholds(p, q, list(block))
        cuts = pieces(h[0]), pieces(h[1], *(cut for cut in later if cut < 1))
        for (u_0, width_0), (u_1, width_1) in itertools.product(*cuts):
            accepted = rule.accepted(h, [u_0, u_1])
            residual = rule.residual(p, q, list(block), accepted)
            weights = law(drafter, block) * width_0 * width_1 * residual / residual.sum()
            for token, weight in enumerate(weights.tolist()):
                if accepted == 2:
                    result[block] += weight
                elif accepted == 1:
                    result[block[0], token] += weight
                else:
                    after = second_token(token, None if fresh else u_1)
                    for other, share in enumerate(after.tolist()):
                        result[token, other] += weight * share
    return max(abs(value - law(TARGET, pair)) for pair, value in result.items())


def test_a_round_needs_numbers_of_its_own_under_block_verification():
    """Token rejection looks at no number behind the first rejection, so positions could key them;
    block verification has looked at all of them."""
    assert two_rounds(RULES["token"], fresh=True) < 1e-15
    assert two_rounds(RULES["token"], fresh=False) < 1e-15
    assert two_rounds(RULES["block"], fresh=True) < 1e-15
    assert two_rounds(RULES["block"], fresh=False) > 0.01
