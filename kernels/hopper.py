"""Whether there is a GPU with the instructions that our CUDA sources and the vendors' packages are made of."""

from functools import cache

import torch

CAPABILITY = 9


@cache
def is_hopper(device: torch.device | None = None) -> bool:
    """Of a CUDA device, by default the current one; no CUDA device is none."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == CAPABILITY
