"""The index of a single store: a set in its own process."""

from collections.abc import Sequence

from kvstore.index import Location
from kvstore.keys import Key


class MemoryIndex:
    def __init__(self, store_id: str, epoch: str) -> None:
        self._store_id = store_id
        self._epoch = epoch
        self._keys: set[Key] = set()

    async def match(self, keys: Sequence[Key]) -> Location | None:
        blocks = next((count for count, key in enumerate(keys) if key not in self._keys), len(keys))
        return Location(self._store_id, self._epoch, blocks) if blocks else None

    async def renew(self) -> int:
        return len(self._keys)

    async def add(self, keys: Sequence[Key]) -> None:
        self._keys.update(keys)

    async def remove(self, keys: Sequence[Key]) -> None:
        self._keys.difference_update(keys)

    async def clear(self) -> None:
        self._keys.clear()

    async def close(self) -> None:
        self._keys.clear()
