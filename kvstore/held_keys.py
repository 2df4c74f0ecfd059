"""Which keys a store holds, in whatever tier, and what has changed since the index was last told."""

import threading
from collections import Counter
from dataclasses import dataclass

from kvstore.keys import Key


@dataclass(frozen=True, slots=True)
class Changes:
    """The net changes of the held keys."""

    stored: list[Key]
    removed: list[Key]


class HeldKeys:
    """Thread-safe: tiers report the keys that they gain and lose, and the publisher reads the changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Number of tiers that hold each key.
        self._tiers: Counter[Key] = Counter()
        # Insertion-ordered sets.
        self._new: dict[Key, None] = {}
        self._gone: dict[Key, None] = {}

    def gained(self, key: Key) -> None:
        """A further tier holds the key."""
        with self._lock:
            self._tiers[key] += 1
            if self._tiers[key] == 1:
                _note(key, self._new, self._gone)

    def lost(self, key: Key) -> None:
        """One tier no longer holds the key."""
        with self._lock:
            self._tiers[key] -= 1
            if not self._tiers[key]:
                del self._tiers[key]
                _note(key, self._gone, self._new)

    def drain_changes(self) -> Changes:
        """The keys gained and lost since the last call, or since the last snapshot."""
        with self._lock:
            changes = Changes(list(self._new), list(self._gone))
            self._new.clear()
            self._gone.clear()
            return changes

    def snapshot(self) -> list[Key]:
        """Every key that is held. After this, `drain_changes` returns the changes from here on."""
        with self._lock:
            self._new.clear()
            self._gone.clear()
            return list(self._tiers)


def _note(key: Key, happened: dict[Key, None], undone: dict[Key, None]) -> None:
    if key in undone:
        del undone[key]
    else:
        happened[key] = None
