"""The requests that this scheduler placed and that have not ended, by tenant."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from mesh.domain.shares import Census, Share

# The outcome of a request whose gateway died is never reported.
MAX_SECONDS = 600.0
MAX_REQUESTS = 100_000


class PlacedRequests:
    """`clock` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._census = Census()
        # In the order in which they were placed: when, as what, and whose.
        self._placed: OrderedDict[int, tuple[float, tuple[str, int], Share]] = OrderedDict()
        # Clients choose request ids: a tenant that gives all of its requests one id has as many all the same.
        self._numbers: dict[tuple[str, int], list[int]] = {}
        self._count = count()

    def ahead(self, share: Share) -> float:
        """Which part of those who wait are served before one more request of this tenant."""
        oldest = self._clock() - MAX_SECONDS
        while self._placed:
            placed_at, placement, _ = next(iter(self._placed.values()))
            if len(self._placed) <= MAX_REQUESTS and placed_at >= oldest:
                break
            self.end(placement)
        return self._census.ahead(share)

    def add(self, placement: tuple[str, int], share: Share) -> None:
        """The attempt with this request id and number was placed."""
        number = next(self._count)
        self._placed[number] = (self._clock(), placement, share)
        self._numbers.setdefault(placement, []).append(number)
        self._census.add(share)

    def end(self, placement: tuple[str, int]) -> None:
        """The attempt has ended: of several of that name the first. One that is not there is left alone."""
        numbers = self._numbers.get(placement)
        if numbers is None:
            return
        _, _, share = self._placed.pop(numbers.pop(0))
        if not numbers:
            del self._numbers[placement]
        self._census.remove(share)
