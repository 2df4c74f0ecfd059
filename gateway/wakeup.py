"""What a client's task sleeps on until there is something for it to read."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

# Calls the callback at that time of the event loop's clock.
CallAt: TypeAlias = Callable[[float, Callable[[], None]], object]


class Wakeup:
    """One task sleeps here at a time; `now` and `when_due` wake it, and do nothing while it is awake.

    A sleep has one timer at most, however often somebody asks for it to end when it is due.
    """

    def __init__(self) -> None:
        self._sleeper: asyncio.Future[None] | None = None
        # When the sleeper wants to be woken for tokens, on the event loop's clock, and who does it.
        self._due = 0.0
        self._call_at: CallAt | None = None
        # Whether it was asked to.
        self._timed = False

    @property
    def awaited(self) -> bool:
        """Whether a task sleeps."""
        return self._sleeper is not None

    async def sleep(self, due: float, call_at: CallAt | None = None, *, timed: bool) -> None:
        """Sleep until `now`, or the first `when_due` once it is `due`. timed: `when_due` has been asked for already.

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
        """Wake the sleeper when it is due: now, if that is over."""
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
