"""What there is of a GPU: whether it is a Hopper, whose instructions our CUDA sources and the vendors' packages use."""

from functools import cache

import torch

CAPABILITY = 9


@cache
def is_hopper(device: torch.device | None = None) -> bool:
    """Whether this CUDA device is a Hopper GPU; None means the current device. False if there is no CUDA device."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == CAPABILITY


@cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a CUDA device. Torch looks the device up anew, which takes the host 2 us."""
    return torch.cuda.get_device_properties(device).multi_processor_count
