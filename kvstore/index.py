"""The index: which store holds which blocks. These are hints for placement; a fetch reads the store's own directory.

A store tells the index what it holds, under its epoch, and renews its lease. The index forgets a store whose lease has
run out, and the earlier epochs of one that was restarted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.keys import Key


@dataclass(frozen=True, slots=True)
class Location:
    """The store that holds the longest prefix of a chain, and how many blocks that prefix has: at least one."""

    store_id: str
    epoch: str
    blocks: int


class Index(Protocol):
    """One store's connection to the index. All methods but `match` raise IndexUnavailable."""

    async def match(self, keys: Sequence[Key]) -> Location | None:
        """The longest prefix of the chain that one live store holds; None if none does, or if no answer comes in
        time.
        """
        ...

    async def renew(self) -> int:
        """Renew this store's lease. Returns how many of its blocks the index has now.

        Raises LeaseConflict if another live process uses this store's id.
        """
        ...

    async def add(self, keys: Sequence[Key]) -> None:
        """This store now holds these blocks."""
        ...

    async def remove(self, keys: Sequence[Key]) -> None:
        """This store no longer holds these blocks."""
        ...

    async def clear(self) -> None:
        """Forget every block of this store."""
        ...

    async def close(self) -> None:
        """End the lease: this store's blocks are gone."""
        ...
