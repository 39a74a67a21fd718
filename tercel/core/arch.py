"""The devices that a target is written for."""

from enum import StrEnum

import torch


class Arch(StrEnum):
    CPU = "cpu"
    SM_90 = "sm_90"
    SM_100 = "sm_100"
    SM_103 = "sm_103"
    SM_107 = "sm_107"


_BY_CAPABILITY = {
    (9, 0): Arch.SM_90,
    (10, 0): Arch.SM_100,
    (10, 3): Arch.SM_103,
    (10, 7): Arch.SM_107,
}


def arch_of(device: torch.device) -> Arch | None:
    """The architecture of `device`; None for a GPU that no target names."""
    if device.type != "cuda":
        return Arch.CPU
    return _BY_CAPABILITY.get(torch.cuda.get_device_capability(device))
