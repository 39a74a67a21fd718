"""kv_dtype=float8: the whole model on a cache of e4m3 codes."""

import torch

from tercel.core.cache import LatentCache
from tests.targets.models import Session, tokens

FAMILY = "kimi_linear"
TYPICAL_ERROR = 0.05
"""The median over tokens: one whose expert another took is further off. Measured: 0.02."""


def logits(kv_dtype, between=lambda session: None):
    """Of a prompt in two chunks, two tokens after it, and a block of three."""
    session, text = Session(FAMILY, max_draft=2, kv_dtype=kv_dtype), tokens(40, 3, FAMILY)
    session.step({"a": text[:20]})
    between(session)
    outs = [session.step({"a": text[20:34]})]
    outs += [session.step(decode={"a": [token]}) for token in text[34:36]]
    outs.append(session.step(decode={"a": text[36:39]}))
    return torch.cat(outs), session


def typical_error(actual, wanted):
    """Rms of a token's logits, over that of the wanted ones."""
    off, size = ((x**2).mean(1).sqrt() for x in (actual - wanted, wanted))
    return float((off / size).median())


def test_codes_change_logits_a_little_and_take_a_byte():
    whole, _ = logits("auto")
    coded, session = logits("float8")
    assert 0 < typical_error(coded, whole) < TYPICAL_ERROR
    for layer in session.cache.latent.values():
        assert layer.pages.nbytes == layer.pages.numel()
        assert layer.page_scale.item() == 1.0


def test_control_another_scale_than_was_written_with():
    def rescale(session):
        latent = session.cache.latent
        for index, layer in latent.items():
            latent[index] = LatentCache(layer.pages, layer.page_scale * 4)

    whole, _ = logits("auto")
    coded, _ = logits("float8", rescale)
    assert typical_error(coded, whole) > 5 * TYPICAL_ERROR
