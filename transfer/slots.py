"""The fixed pool of staging slots: which direction may acquire a slot, and when a slot becomes free."""

from collections.abc import Sequence
from enum import Enum
from typing import Any


class Direction(Enum):
    SENDING = "sending"
    RECEIVING = "receiving"


class SlotPool:
    """Slots are numbered from 0. Each is free, held by one segment, or quarantined.

    A quarantined slot belongs to a transfer that was given up while UCX may still use its memory. It becomes free only
    when UCX has completed the request, or when its endpoint is closed. Neither direction may hold all slots: two
    processes that send to each other could otherwise wait for each other's slots forever.
    """

    def __init__(self, staging: Sequence[Any]) -> None:
        """staging: the buffer of each slot, as the process's `KvMemory` allocates them."""
        assert len(staging) >= 2, "one slot for each direction"
        self._staging = staging
        self._free = list(reversed(range(len(staging))))
        self._users: dict[int, Direction] = {}
        self._in_use = dict.fromkeys(Direction, 0)
        self._quarantined: set[int] = set()

    @property
    def total(self) -> int:
        return len(self._staging)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def can_acquire(self, direction: Direction) -> bool:
        return bool(self._free) and self._in_use[direction] < self.total - 1

    def acquire(self, direction: Direction) -> int | None:
        """A free slot; None if there is none for this direction."""
        if not self.can_acquire(direction):
            return None
        slot = self._free.pop()
        self._users[slot] = direction
        self._in_use[direction] += 1
        return slot

    def staging(self, slot: int) -> Any:
        """The slot's buffer."""
        return self._staging[slot]

    def quarantine(self, slot: int) -> None:
        """The transfer that holds the slot was given up; UCX may still read or write it."""
        assert slot in self._users and slot not in self._quarantined
        self._quarantined.add(slot)

    def release(self, slot: int) -> None:
        """Nothing uses the slot any more."""
        direction = self._users.pop(slot, None)
        assert direction is not None, f"slot {slot} is free already"
        self._in_use[direction] -= 1
        self._quarantined.discard(slot)
        self._free.append(slot)
