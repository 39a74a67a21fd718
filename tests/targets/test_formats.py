"""Programs on the same weights in other formats, and in the dtype they are stored in."""

from copy import deepcopy

import pytest
import torch

from tercel.reference.weights import cast
from tests.targets.models import (
    FAMILIES,
    Session,
    expected,
    program,
    reference,
    relative_error,
    tokens,
)

LENGTH = 17


def logits(family: str, text: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of a prefill of twelve tokens and five decode steps."""
    session = Session(family, dtype=dtype)
    steps = [session.step({"a": text[:12]})[0]]
    steps += [session.step(decode={"a": [token]})[0] for token in text[12:]]
    return torch.stack(steps)


@pytest.mark.parametrize("form", ["nvfp4", "bf16"])
def test_an_exact_conversion_changes_no_bit(form):
    text = tokens(LENGTH, 0, "kimi_k3")
    converted, original = logits(f"kimi_k3 as {form}", text), logits("kimi_k3", text)
    assert torch.equal(converted, original)


def test_control_another_second_scale_is_seen():
    """One expert's gate twice as large moves the logits."""
    text = tokens(LENGTH, 0, "kimi_k3")
    right = logits("kimi_k3 as nvfp4", text)
    experts = program("kimi_k3 as nvfp4").weights.layers[1].mlp.experts
    half = experts.w13.shape[1] // 2
    experts.w13[:, :half].mul_(2)
    try:
        assert relative_error(logits("kimi_k3 as nvfp4", text), right) > 1e-3
    finally:
        experts.w13[:, :half].div_(2)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16(family):
    """As near to fp64 as the reference in bf16. Single tokens may be far off on both sides: where
    two experts' scores are near, a rounding decides between them."""
    text = tokens(LENGTH, 1, family)
    wanted = expected(family, text)[11:]
    model = cast(deepcopy(reference(family)).float(), torch.bfloat16)
    with torch.inference_mode():
        theirs = model(torch.tensor([text]))[0][11:]
    ours = logits(family, text, torch.bfloat16)
    assert median_error(ours, wanted) <= 1.2 * median_error(theirs, wanted) < 0.25


def median_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((actual.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).median())
