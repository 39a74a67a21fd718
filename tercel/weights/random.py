"""Random tensors with the names, shapes and dtypes of a checkpoint, sane enough to run."""

import math

import torch

from tercel.core.mxfp4 import BLOCK

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
}
_CODE_RMS = 2.93  # of the sixteen E2M1 values


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
        exponent = 127 - round(math.log2(_CODE_RMS * math.sqrt(shape[-1] * BLOCK)))
        scale = torch.randint(-1, 2, shape, device=device, generator=generator) + exponent
        return scale.to(torch.uint8)
    value = torch.empty(shape, device=device, dtype=torch.float32)
    value.normal_(generator=generator)
    if "norm" in key:
        value.mul_(0.1).add_(1)
    elif leaf in ("A_log", "dt_bias", "e_score_correction_bias", "router_bias"):
        value.mul_(0.1)
    elif len(shape) > 1:
        value.mul_(shape[-1] ** -0.5)
    return value.to(dtype)
