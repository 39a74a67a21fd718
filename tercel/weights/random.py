"""Random tensors with the names, shapes and dtypes of a checkpoint, sane enough to run."""

import math

import torch

from tercel.core import mxfp4, nvfp4

_CODE_RMS = 2.93  # of the sixteen E2M1 values
_SCALE_2 = 2.0**-6
"""Size of fp32 scales: what they multiply is in the middle of e4m3's range then."""


def random_tensor(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """On the generator's device.

    Matrices keep the size of what they multiply, norms are near one, decays mild and all different.
    """
    device = generator.device
    leaf = key.rpartition(".")[2]
    if dtype is torch.uint8 and not leaf.endswith("_scale"):
        return torch.randint(256, shape, dtype=dtype, device=device, generator=generator)
    if dtype is torch.uint8:
        exponent = 127 - round(math.log2(_CODE_RMS * math.sqrt(shape[-1] * mxfp4.BLOCK)))
        scale = torch.randint(-1, 2, shape, device=device, generator=generator) + exponent
        return scale.to(torch.uint8)
    value = torch.empty(shape, device=device, dtype=torch.float32)
    value.normal_(generator=generator)
    if leaf.endswith("_scale") and dtype is torch.float8_e4m3fn:
        size = _CODE_RMS * math.sqrt(shape[-1] * nvfp4.BLOCK) * _SCALE_2
        value.mul_(0.1).add_(1).div_(size)
    elif leaf.endswith(("_scale", "_scale_2")):
        value.mul_(0.1).add_(1).mul_(_SCALE_2)
    elif "norm" in key:
        value.mul_(0.1).add_(1)
    elif leaf in ("A_log", "dt_bias", "e_score_correction_bias", "router_bias"):
        value.mul_(0.1)
    elif len(shape) > 1:
        size = _SCALE_2 if dtype is torch.float8_e4m3fn else 1.0
        value.mul_(shape[-1] ** -0.5 / size)
    return value.to(dtype)
