"""The index: which store holds which blocks. Hints for placement; a fetch reads the store's own directory.

A store tells its index what it stores, under its epoch, while it renews its lease. Nothing is believed of a store
whose lease ran out, nor of an earlier epoch of one that was restarted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.keys import Key


@dataclass(frozen=True, slots=True)
class Location:
    """The store that holds the longest prefix of a chain, and how many blocks that is: at least one."""

    store_id: str
    epoch: str
    blocks: int


class Index(Protocol):
    """One store's connection to the index. All but `match` raise IndexUnavailable."""

    async def match(self, keys: Sequence[Key]) -> Location | None:
        """Longest prefix of the chain that one live store holds; None also while the index does not answer."""
        ...

    async def renew(self) -> int:
        """Renew this store's lease; returns how many of its blocks the index believes in now.

        Raises LeaseConflict where another live process has this store's id.
        """
        ...

    async def add(self, keys: Sequence[Key]) -> None:
        """This store holds these blocks now."""
        ...

    async def remove(self, keys: Sequence[Key]) -> None:
        """This store holds these blocks no longer."""
        ...

    async def clear(self) -> None:
        """Forget every block of this store."""
        ...

    async def close(self) -> None:
        """Give up the lease: this store's blocks are gone."""
        ...
