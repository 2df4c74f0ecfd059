"""The parts of a step take turns: while one waits for other ranks, the rank computes another.

Each part is an ordinary call, on a greenlet of its own. All of them run on the thread that called `take`, so that one
CUDA graph captures them together. They also share what torch keeps for each thread: its current stream and its
inference mode. So a part must not wait within a block that changes these.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TypeVar

ResultT = TypeVar("ResultT")


class StepTurns:
    """The turns of one rank. All ranks take the same turns in the same order.

    Attributes:
        parts: how many calls take turns now; 1 while nothing does.
        part: the index of the one that runs.
    """

    def __init__(self) -> None:
        self.parts = 1
        self.part = 0
        self._next: Callable[[], object] | None = None

    @property
    def taken(self) -> bool:
        """Whether other calls run while this one waits."""
        return self.parts > 1

    def take(self, calls: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        """The results of the calls. Each runs until it ends or calls `wait`, then the next one does, in a fixed order.

        If one raises, the others end where they wait.
        """
        if len(calls) == 1:
            return [calls[0]()]
        # Imported only here: few workers take turns.
        from greenlet import getcurrent, greenlet

        assert not self.taken, "calls that take turns do not nest"
        self.parts, self._next = len(calls), getcurrent().switch
        running = deque((index, greenlet(call)) for index, call in enumerate(calls))
        results: dict[int, ResultT] = {}
        try:
            for _, each in running:
                # A greenlet has its own context variables, in which Triton keeps its allocator.
                each.gr_context = copy_context()
            while running:
                self.part, each = running.popleft()
                result = each.switch()
                if each.dead:
                    results[self.part] = result
                else:
                    running.append((self.part, each))
        finally:
            self.parts, self.part, self._next = 1, 0, None
            for _, each in running:
                each.throw()
        return [results[index] for index in range(len(calls))]

    def wait(self) -> None:
        """Let the other calls run before this one goes on; returns at once if there are none."""
        if self._next is not None:
            self._next()
