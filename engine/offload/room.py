"""One piece of memory for all tensors of a layer's experts, so that one copy moves them all."""

import math

import torch

# Every tensor begins at a multiple of this. Tensor maps need 16, and wide loads no more.
ALIGNMENT = 1024
# More than any layer's experts take.
_MOST_BYTES = 1 << 50


class Room:
    """A NewTensor of formats: cuts tensors from its memory, one after another. The same shapes asked for in the same
    order lie at the same places of each room.
    """

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype) -> None:
        """memory: [bytes] uint8; dtype: of tensors by default."""
        self._memory = memory
        self._dtype = dtype
        self.used_bytes = 0

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self._dtype
        size = math.prod(shape) * dtype.itemsize
        part = self._memory[self.used_bytes : self.used_bytes + size]
        assert len(part) == size, "the room was measured for fewer tensors"
        self.used_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return part.view(dtype).view(shape)


def endless_room(dtype: torch.dtype) -> Room:
    """A room without memory, to measure how much would be used."""
    return Room(torch.empty(_MOST_BYTES, dtype=torch.uint8, device="meta"), dtype)
