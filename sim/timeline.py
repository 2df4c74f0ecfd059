"""Simulated time: what happens when, in one heap."""

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Timeline:
    """Runs actions in the order of their times; of equal times, in the order in which they were asked for.

    Attributes:
        now: seconds since the simulation began.
        events: how many actions have run.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._numbers = count()
        self._heap: list[tuple[float, int, Action]] = []

    def __call__(self) -> float:
        """The product's code takes it as its clock."""
        return self.now

    def at(self, time: float, action: Action) -> None:
        heapq.heappush(self._heap, (time if time > self.now else self.now, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def soon(self, seconds: float, action: Action) -> None:
        """As `after`, but at once if that takes no time."""
        if seconds:
            self.after(seconds, action)
        else:
            action()

    def every(self, seconds: float, action: Action) -> None:
        """Again and again, first after `seconds`."""

        def again() -> None:
            action()
            self.after(seconds, again)

        self.after(seconds, again)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Until nothing is left to do or `goes_on` says no."""
        heap, pop = self._heap, heapq.heappop
        while heap and goes_on():
            self.now, _, action = pop(heap)
            self.events += 1
            action()
