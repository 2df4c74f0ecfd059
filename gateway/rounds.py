"""When clients' tasks wake to read tokens: each sleeps in a `Wakeup`, and common `Rounds` wake many at once."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

# Calls the callback at that time of the event loop's clock.
CallAt: TypeAlias = Callable[[float, Callable[[], None]], object]


class Wakeup:
    """One task sleeps here at a time; `now` and `when_due` wake it, and do nothing while it is awake.

    A sleep has at most one timer, however often `when_due` is called.
    """

    def __init__(self) -> None:
        self._sleeper: asyncio.Future[None] | None = None
        # When the sleeper may be woken for tokens, on the event loop's clock, and what schedules the timer.
        self._due = 0.0
        self._call_at: CallAt | None = None
        # Whether this sleep has its timer.
        self._timed = False

    @property
    def awaited(self) -> bool:
        """Whether a task sleeps."""
        return self._sleeper is not None

    async def sleep(self, due: float, call_at: CallAt | None = None, *, timed: bool) -> None:
        """Sleep until `now` is called, or until `due` if `when_due` is called. timed: behave as if it has been called
        already.

        call_at: by default the event loop's.
        """
        loop = asyncio.get_running_loop()
        self._sleeper, self._due, self._call_at, self._timed = loop.create_future(), due, call_at or loop.call_at, False
        if timed:
            self.when_due()
        try:
            await self._sleeper
        finally:
            self._sleeper = None

    def when_due(self) -> None:
        """Wake the sleeper once it is due; at once if that time has passed."""
        if self._sleeper is None or self._timed:
            return
        if self._sleeper.get_loop().time() >= self._due:
            self.now()
        else:
            assert self._call_at is not None
            self._timed = True
            self._call_at(self._due, self.now)

    def now(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)


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
