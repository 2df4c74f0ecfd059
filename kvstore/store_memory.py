"""The store's memory, block-major: what a block holds of all layers lies together."""

from typing import Any

import numpy as np

from transfer.host_memory import HostMemory


class StoreMemory(HostMemory):
    def __init__(self, layers: int, blocks: int, piece_bytes: int) -> None:
        # Zeros, for which the machine gives no memory until they are written.
        array = np.zeros((blocks, layers, piece_bytes), np.uint8)
        super().__init__(array.transpose(1, 0, 2))
        self._blocks: np.ndarray[tuple[int, int], np.dtype[Any]] = array.reshape(blocks, -1)

    def block(self, number: int) -> memoryview:
        """Its bytes, all layers."""
        return memoryview(self._blocks[number])
