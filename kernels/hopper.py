"""Facts about a GPU: whether it is a Hopper, whose instructions our CUDA sources and the vendors' packages use."""

from functools import cache

import torch

CAPABILITY = 9


@cache
def is_hopper(device: torch.device | None = None) -> bool:
    """Whether this CUDA device is a Hopper GPU; None means the current device. False if there is no CUDA device."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == CAPABILITY


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has. Kept, since torch looks the device up anew, in 2 us of the host."""
    return torch.cuda.get_device_properties(device).multi_processor_count
