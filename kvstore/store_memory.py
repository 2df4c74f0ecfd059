"""The store's memory, block-major: all layers of a block lie together."""

from typing import Any

import numpy as np

from transfer.host_memory import HostMemory
from transfer.shared_memory import SharedMemory
from transfer.ticket import SlabHandle


class StoreMemory(HostMemory):
    """Workers of the same host may map it."""

    def __init__(self, layers: int, blocks: int, piece_bytes: int) -> None:
        self._shared = SharedMemory(blocks * layers * piece_bytes)
        array = self._shared.array.reshape(blocks, layers, piece_bytes)
        super().__init__(array.transpose(1, 0, 2))
        self._blocks: np.ndarray[tuple[int, int], np.dtype[Any]] = array.reshape(blocks, -1)

    @property
    def handle(self) -> SlabHandle | None:
        """With which a worker maps it; None if this system does not say which host it is."""
        memory = self._shared.handle
        return None if memory is None else SlabHandle(memory, self.layers, self.blocks, self.piece_bytes)

    def block(self, number: int) -> memoryview:
        """The bytes of a block, all layers."""
        return memoryview(self._blocks[number])
