"""Which slot of the file has which key, and which gives way."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.held_keys import HeldKeys
from kvstore.keys import Key


@dataclass(slots=True)
class _Kept:
    slot: int
    readers: int = 0


class SlotTable:
    """Thread-safe. A slot is blank, being written, or has a key; the least recently used one gives way, unless somebody
    reads it.
    """

    def __init__(self, held: HeldKeys) -> None:
        self._held = held
        self._lock = threading.Lock()
        # Least recently used first.
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._writing: set[Key] = set()
        self._blank: list[int] = []

    def __len__(self) -> int:
        return len(self._kept)

    def found(self, slot: int, key: Key | None) -> None:
        """A slot as the file has it when it is opened."""
        with self._lock:
            if key is None or key in self._kept or key in self._writing:
                self._blank.append(slot)
            else:
                self._keep(key, slot)
                # It was last used before all that is in use now.
                self._kept.move_to_end(key, last=False)

    def known(self, keys: Sequence[Key]) -> int:
        """How many leading keys have slots."""
        with self._lock:
            return next((number for number, key in enumerate(keys) if key not in self._kept), len(keys))

    def has(self, key: Key) -> bool:
        """Whether it has a slot, or is being written to one."""
        with self._lock:
            return key in self._kept or key in self._writing

    def begin_read(self, key: Key) -> int | None:
        """Its slot, which stays as it is until `end_read`; None if it has none any more."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            kept.readers += 1
            self._kept.move_to_end(key)
            return kept.slot

    def end_read(self, key: Key, damaged: bool = False) -> None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return
            kept.readers -= 1
            if damaged:
                self._drop(key)

    def begin_write(self, key: Key) -> int | None:
        """A slot to write it to; None if it has one, or if there is none to give."""
        with self._lock:
            if key in self._kept or key in self._writing:
                return None
            if not self._blank:
                oldest = next((each for each, kept in self._kept.items() if not kept.readers), None)
                if oldest is None:
                    return None
                self._drop(oldest)
            self._writing.add(key)
            return self._blank.pop()

    def end_write(self, key: Key, slot: int, written: bool) -> None:
        with self._lock:
            self._writing.remove(key)
            if written:
                self._keep(key, slot)
            else:
                self._blank.append(slot)

    def _keep(self, key: Key, slot: int) -> None:
        self._kept[key] = _Kept(slot)
        self._held.gained(key)

    def _drop(self, key: Key) -> None:
        self._blank.append(self._kept.pop(key).slot)
        self._held.lost(key)
