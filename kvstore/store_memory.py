"""The store's memory, block-major: all layers of a block lie together."""

from typing import Any

import numpy as np

from transfer.host_memory import HostMemory

# Direct I/O needs offsets, lengths and memory aligned to this; it is at least the sector size of every common medium.
ALIGNMENT = 4096


class StoreMemory(HostMemory):
    """Memory that begins on a page, so that disks can read into it and write from it directly."""

    def __init__(self, layers: int, blocks: int, piece_bytes: int) -> None:
        size_bytes = blocks * layers * piece_bytes
        # Untouched zeros: the machine provides no memory for them until they are written.
        zeros = np.zeros(size_bytes + ALIGNMENT, np.uint8)
        first = -zeros.ctypes.data % ALIGNMENT
        array = zeros[first : first + size_bytes].reshape(blocks, layers, piece_bytes)
        super().__init__(array.transpose(1, 0, 2))
        self._blocks: np.ndarray[tuple[int, int], np.dtype[Any]] = array.reshape(blocks, -1)

    def block(self, number: int) -> memoryview:
        """The bytes of a block, all layers."""
        return memoryview(self._blocks[number])
