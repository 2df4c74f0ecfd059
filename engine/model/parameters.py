"""Where a module's tensors come from: checkpoint names to the memory that they are read into."""

from collections.abc import Iterator

import torch

# A tensor's name in the checkpoint, and its place (perhaps a part of a fused matrix).
NamedParameters = Iterator[tuple[str, torch.Tensor]]


class Allocator:
    """Makes uninitialised parameters of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
