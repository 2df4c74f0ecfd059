"""The fixed pool of staging slots: who may take one, and when one comes back."""

from enum import Enum


class Direction(Enum):
    SENDING = "sending"
    RECEIVING = "receiving"


class SlotPool:
    """Slots are numbered from 0. Each is free, held by one segment, or quarantined.

    A quarantined slot belongs to a transfer that was given up while UCX may still touch its memory: only UCX's word
    (the request completed, or its endpoint is closed) brings it back. Neither direction may take the last slot, or two
    processes that send to each other could wait for each other's slots forever.
    """

    def __init__(self, count: int) -> None:
        assert count >= 2, "one slot for each direction"
        self._count = count
        self._free = list(reversed(range(count)))
        self._held: dict[int, Direction] = {}
        self._quarantined: dict[int, Direction] = {}

    @property
    def total(self) -> int:
        return self._count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def can_acquire(self, direction: Direction) -> bool:
        return bool(self._free) and self._taken(direction) < self._count - 1

    def acquire(self, direction: Direction) -> int | None:
        """A free slot, or None where there is none for this direction."""
        if not self.can_acquire(direction):
            return None
        slot = self._free.pop()
        self._held[slot] = direction
        return slot

    def quarantine(self, slot: int) -> None:
        """The transfer that holds it was given up; UCX may still read or write it."""
        self._quarantined[slot] = self._held.pop(slot)

    def release(self, slot: int) -> None:
        """Nothing touches the slot any more."""
        owner = self._held.pop(slot, None) or self._quarantined.pop(slot, None)
        assert owner is not None, f"slot {slot} is free already"
        self._free.append(slot)

    def _taken(self, direction: Direction) -> int:
        taken = sum(each is direction for each in self._held.values())
        return taken + sum(each is direction for each in self._quarantined.values())
