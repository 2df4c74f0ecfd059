"""A thread for long work, such as encoding a prompt of a million characters, and the line before it."""

import asyncio
from bisect import insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple, TypeVar

from mesh.errors import Overloaded

ResultT = TypeVar("ResultT")

# How many times its own size of works that come after it one work lets pass.
PATIENCE = 64


class _Waiting(NamedTuple):
    rank: int
    number: int
    size: int
    turn: asyncio.Future[None]


class ShortestFirst:
    """Runs one work at a time, the shortest first, so that none waits for others that take a hundred times as long. One
    that has let PATIENCE times its own size pass goes before all that come then.

    While more than `most_waiting` waits, in the unit of the sizes, the last is refused: what waits takes memory.
    """

    def __init__(self, name: str, most_waiting: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._most_waiting = most_waiting
        self._busy = False
        # The sizes of all works that were begun: the clock by which those that wait age.
        self._begun = 0
        # Those that wait, in order of rank and number; each is told when its turn comes.
        self._line: list[_Waiting] = []
        # The sum of their sizes.
        self._waiting = 0
        self._numbers = count()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """The result of the work. Raises what it raises, and Overloaded if it is refused."""
        if self._busy:
            await self._turn(size)
        self._busy = True
        self._begun += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._pass_on()

    async def _turn(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Who waits gains on those that come later by what was begun in between.
        waiting = _Waiting(PATIENCE * size + self._begun, next(self._numbers), size, turn)
        insort(self._line, waiting)
        self._waiting += size
        if self._waiting > self._most_waiting:
            last = self._leave(-1)
            # Done if its caller was cancelled.
            if not last.done():
                last.set_exception(Overloaded("too many long prompts wait: retry", retry_after_ms=1000))
        try:
            await turn
        except asyncio.CancelledError:
            if waiting in self._line:
                self._leave(self._line.index(waiting))
            elif not turn.cancelled() and turn.exception() is None:
                # Its turn had come already.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._line:
            turn = self._leave(0)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    def _leave(self, place: int) -> asyncio.Future[None]:
        """Take the one at this place out of the line; returns its turn."""
        left = self._line.pop(place)
        self._waiting -= left.size
        return left.turn
