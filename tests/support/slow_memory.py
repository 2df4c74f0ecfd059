"""KV memory whose copies complete when a test says so, or when they are waited for."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from transfer.host_memory import HostMemory
from transfer.memory import Check, Done, HostSource, KeyedPieces, Pool
from transfer.segments import Tile


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

    def host_side(self, staging: Any) -> Any:
        return self._memory.host_side(staging)

    def received(self, staging: Any, size_bytes: int) -> None:
        self._memory.received(staging, size_bytes)

    def tags(self, staging: Any, tile: Tile, keyed: Sequence[KeyedPieces]) -> list[bytes]:
        return self._memory.tags(staging, tile, keyed)

    def host_source(self, mapped: Pool) -> "SlowSource":
        return SlowSource(self, self._memory.host_source(mapped))

    def prepare(self, key: bytes) -> None:
        self._memory.prepare(key)

    def gather(self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes) -> Copying:
        return self.later(lambda: self._memory.gather(first_layer, layer_count, blocks, staging, key))

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes, checksum: bytes
    ) -> Copying:
        return self.later(lambda: self._memory.land(first_layer, layer_count, blocks, staging, key, checksum))

    def later(self, copy: Callable[[], Done[Any]]) -> Copying:
        self.copies.append(Copying(copy))
        return self.copies[-1]


class SlowSource:
    """A `transfer.memory.HostSource` of a SlowMemory."""

    def __init__(self, memory: SlowMemory, source: HostSource) -> None:
        self._memory = memory
        self._source = source

    def copy(self, tile: Tile, sources: Sequence[int], blocks: Sequence[int], check: Check | None = None) -> Copying:
        return self._memory.later(lambda: cast("Done[str | None]", self._source.copy(tile, sources, blocks, check)))


class LateMemory(SlowMemory):
    """Copies complete by themselves when they are looked at the second time, as a device's that took a moment."""

    def later(self, copy: Callable[[], Done[Any]]) -> Copying:
        self.copies.append(LateCopying(copy))
        return self.copies[-1]


class LateCopying(Copying):
    _looks = 0

    @property
    def completed(self) -> bool:
        self._looks += 1
        if self._looks > 1:
            self.result()
        return super().completed
