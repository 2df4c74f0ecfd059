"""KV memory whose copies are done when a test says so, or when somebody waits for them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transfer.host_memory import HostMemory, Pool


class Copying:
    def __init__(self, copy: Callable[[], Any]) -> None:
        self._copy = copy
        self._digest: bytes | None = None

    @property
    def completed(self) -> bool:
        return self._digest is not None

    def result(self) -> bytes:
        if self._digest is None:
            self._digest = self._copy().result()
        return self._digest


class SlowMemory:
    """A `transfer.memory.KvMemory`."""

    is_on_gpu = False

    def __init__(self, array: Pool) -> None:
        self._memory = HostMemory(array)
        self.layers, self.blocks, self.piece_bytes = array.shape
        # In the order in which they began.
        self.copies: list[Copying] = []

    def allocate_staging(self, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._memory.allocate_staging(size_bytes)

    def enter_thread(self) -> None:
        self._memory.enter_thread()

    def gather(self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes) -> Copying:
        return self._later(lambda: self._memory.gather(first_layer, layer_count, blocks, staging, key))

    def digest(self, staging: Any, size_bytes: int, key: bytes) -> Copying:
        return self._later(lambda: self._memory.digest(staging, size_bytes, key))

    def scatter(self, staging: Any, first_layer: int, layer_count: int, blocks: Sequence[int]) -> Copying:
        return self._later(lambda: self._memory.scatter(staging, first_layer, layer_count, blocks))

    def _later(self, copy: Callable[[], Any]) -> Copying:
        self.copies.append(Copying(copy))
        return self.copies[-1]
