"""Facts about a GPU: its sizes, and whether it is a Hopper, whose instructions our CUDA sources and vendors use."""

from dataclasses import dataclass
from functools import cache

import torch

CAPABILITY = 9
HOPPER_SHARED_BYTES = 232_448
# How many clusters an H200 runs at once, by the CTAs of a cluster, if a CTA fills a multiprocessor. Those of eight are
# counted, not measured. 16 clusters of six ran at once, and of seven in two turns.
MOST_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 6: 16, 7: 14, 8: 14}


@dataclass(frozen=True, slots=True)
class ClusterTiling:
    """How a product is tiled: a tile has `outputs` outputs, and a cluster of `ctas` CTAs shares its inputs."""

    outputs: int
    ctas: int

    def tiles(self, outputs: int) -> int:
        return -(-outputs // self.outputs)


@cache
def is_hopper(device: torch.device | None = None) -> bool:
    """Whether this CUDA device is a Hopper GPU; None means the current device. False if there is no CUDA device."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == CAPABILITY


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has. Kept, since torch looks the device up each time, which takes
    the host 2 us.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """How much shared memory a block may have; what a Hopper GPU gives where there is no CUDA device."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    # Torch has it, and its annotations do not.
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
