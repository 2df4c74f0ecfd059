"""The times at which tokens go to clients."""

import asyncio
from collections.abc import Callable


class Rounds:
    """Common send times for all streams: one timer wakes many of them, and one turn of the event loop writes to all.
    Use it only on the event loop that creates it.
    """

    def __init__(self, spacing: Callable[[], float]) -> None:
        """spacing: seconds between two rounds."""
        self._loop = asyncio.get_running_loop()
        self._spacing = spacing
        # Callbacks that wait, by the time of their round.
        self._waiting: dict[float, list[Callable[[], None]]] = {}

    def next(self) -> float:
        """The time of the next round, on the event loop's clock."""
        spacing = self._spacing()
        return (self._loop.time() // spacing + 1) * spacing

    def call_at(self, due: float, wake: Callable[[], None]) -> None:
        """Call `wake` in the round at time `due`."""
        waiting = self._waiting.get(due)
        if waiting is None:
            self._waiting[due] = [wake]
            self._loop.call_at(due, self._begin, due)
        else:
            waiting.append(wake)

    def _begin(self, due: float) -> None:
        for wake in self._waiting.pop(due):
            wake()
