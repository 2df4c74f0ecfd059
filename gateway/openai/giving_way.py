"""Which connections give way to new ones, found without looking at all: thousands may come while all are taken."""

from collections import OrderedDict
from typing import Generic, TypeVar

ConnectionT = TypeVar("ConnectionT")


class GivingWay(Generic[ConnectionT]):
    """Those that are idle, and those whose request is not whole, in the order in which they became so."""

    def __init__(self) -> None:
        # Ordered dictionaries also find their first entry at once after others before it were removed.
        self._idle: OrderedDict[ConnectionT, None] = OrderedDict()
        self._reading: OrderedDict[ConnectionT, None] = OrderedDict()
        self._closing: set[ConnectionT] = set()

    @property
    def closing(self) -> int:
        """How many have been closed and are not lost yet."""
        return len(self._closing)

    def note(self, connection: ConnectionT, *, idle: bool, reading: bool) -> None:
        """Its state may have changed. One that stays idle is idle from now on."""
        if not reading:
            self._reading.pop(connection, None)
        self._idle.pop(connection, None)
        if idle:
            self._idle[connection] = None
        elif reading:
            self._reading.setdefault(connection)

    def closes(self, connection: ConnectionT) -> None:
        self.lost(connection)
        self._closing.add(connection)

    def lost(self, connection: ConnectionT) -> None:
        for each in (self._idle, self._reading):
            each.pop(connection, None)
        self._closing.discard(connection)

    def longest_idle(self) -> ConnectionT | None:
        return next(iter(self._idle), None)

    def longest_reading(self) -> ConnectionT | None:
        return next(iter(self._reading), None)
