"""KV memory whose copies complete when a test says so, or when they are waited for."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transfer.checksum import Bytes
from transfer.host_memory import HostMemory, Pool
from transfer.memory import Done, HostSource


class Copying:
    def __init__(self, copy: Callable[[], Done[Any]]) -> None:
        self._copy = copy
        self._done: Done[Any] | None = None

    @property
    def completed(self) -> bool:
        return self._done is not None

    def result(self) -> Any:
        if self._done is None:
            self._done = self._copy()
        return self._done.result()


class SlowMemory:
    """A `transfer.memory.KvMemory`."""

    is_on_gpu = False

    def __init__(self, array: Pool) -> None:
        self._memory = HostMemory(array)
        self.layers, self.blocks, self.piece_bytes = array.shape
        # Copies in the order in which they began.
        self.copies: list[Copying] = []

    def allocate_staging(self, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._memory.allocate_staging(size_bytes)

    def enter_thread(self) -> None:
        self._memory.enter_thread()

    def read_staging(self, staging: Any, size_bytes: int) -> memoryview:
        return self._memory.read_staging(staging, size_bytes)

    def host_source(self, mapped: Bytes) -> HostSource:
        return self._memory.host_source(mapped)

    def prepare(self, key: bytes) -> None:
        self._memory.prepare(key)

    def gather(self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes) -> Copying:
        return self._later(lambda: self._memory.gather(first_layer, layer_count, blocks, staging, key))

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes, checksum: bytes
    ) -> Copying:
        return self._later(lambda: self._memory.land(first_layer, layer_count, blocks, staging, key, checksum))

    def place(self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any) -> Copying:
        return self._later(lambda: self._memory.place(first_layer, layer_count, blocks, staging))

    def _later(self, copy: Callable[[], Done[Any]]) -> Copying:
        self.copies.append(Copying(copy))
        return self.copies[-1]


class PromptMemory(SlowMemory):
    """Copies have completed when they have begun. Its blocks are only reached through staging buffers, as a GPU's."""

    def _later(self, copy: Callable[[], Done[Any]]) -> Copying:
        copying = super()._later(copy)
        copying.result()
        return copying
