"""The store's memory, block-major: what a block holds of all layers lies together."""

from typing import Any

import numpy as np

from transfer.host_memory import HostMemory

# Direct I/O needs it of offsets, lengths and memory: at least the sector size of every common medium.
ALIGNMENT = 4096


class StoreMemory(HostMemory):
    """It begins on a page, so that disks read into it and write from it."""

    def __init__(self, layers: int, blocks: int, piece_bytes: int) -> None:
        size_bytes = blocks * layers * piece_bytes
        # Zeros, for which the machine gives no memory until they are written.
        zeros = np.zeros(size_bytes + ALIGNMENT, np.uint8)
        first = -zeros.ctypes.data % ALIGNMENT
        array = zeros[first : first + size_bytes].reshape(blocks, layers, piece_bytes)
        super().__init__(array.transpose(1, 0, 2))
        self._blocks: np.ndarray[tuple[int, int], np.dtype[Any]] = array.reshape(blocks, -1)

    def block(self, number: int) -> memoryview:
        """Its bytes, all layers."""
        return memoryview(self._blocks[number])
