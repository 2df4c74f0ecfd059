"""A thread for long work, such as encoding a prompt of a million characters, and the line before it."""

import asyncio
from bisect import insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

from mesh.errors import Overloaded

ResultT = TypeVar("ResultT")


class ShortestFirst:
    """Runs one work at a time, the shortest first, so that none waits for others that take a hundred times as long.

    While more than `most_waiting` waits, in the unit of the sizes, the longest is refused: what waits takes memory.
    """

    def __init__(self, name: str, most_waiting: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._most_waiting = most_waiting
        self._busy = False
        # Shortest first, by size and number; each is told when its turn comes.
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """The result of the work. Raises what it raises, and Overloaded if it is refused."""
        if self._busy:
            await self._turn(size)
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._pass_on()

    async def _turn(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (size, next(self._numbers), turn)
        insort(self._line, waiting)
        if sum(size for size, _, _ in self._line) > self._most_waiting:
            *_, longest = self._line.pop()
            # Done if its caller was cancelled.
            if not longest.done():
                longest.set_exception(Overloaded("too many long prompts wait: retry", retry_after_ms=1000))
        try:
            await turn
        except asyncio.CancelledError:
            if waiting in self._line:
                self._line.remove(waiting)
            elif not turn.cancelled() and turn.exception() is None:
                # Its turn had come already.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._line:
            *_, turn = self._line.pop(0)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
