"""Simulated time: what happens when, in one heap."""

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Timeline:
    """Runs actions in the order of their times. Actions at the same time run in the order in which they were added.

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
        """Simulated seconds: the product's code uses a timeline as its clock."""
        return self.now

    def at(self, time: float, action: Action) -> None:
        heapq.heappush(self._heap, (time if time > self.now else self.now, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def soon(self, seconds: float, action: Action) -> None:
        """As `after`, but runs the action immediately if `seconds` is 0."""
        if seconds:
            self.after(seconds, action)
        else:
            action()

    def every(self, seconds: float, action: Action) -> None:
        """Run the action every `seconds`, first after `seconds`."""

        def again() -> None:
            action()
            self.after(seconds, again)

        self.after(seconds, again)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Run actions until none is left or `goes_on` returns False."""
        heap, pop = self._heap, heapq.heappop
        while heap and goes_on():
            self.now, _, action = pop(heap)
            self.events += 1
            action()

    def run_until(self, time: float) -> None:
        """Run all actions up to this time, which it then is."""
        self.run(lambda: self._heap[0][0] <= time)
        self.now = time
