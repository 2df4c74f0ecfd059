"""The requests that this scheduler placed and that have not ended: whose they are, and where."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from mesh.domain.shares import Census, Share
from scheduler.ends import PlacementKey

# The outcome of a request whose gateway died is never reported.
MAX_SECONDS = 600.0
MAX_REQUESTS = 100_000


class Placed(NamedTuple):
    """Where a request is, and how long its answer may be."""

    model: str
    worker_ids: tuple[str, ...]
    max_tokens: int


class PlacedRequests:
    """`clock` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._census = Census()
        # In the order in which they were placed: when, whose, and where.
        self._placed: OrderedDict[PlacementKey, tuple[float, Share, Placed]] = OrderedDict()

    def ahead(self, share: Share) -> float:
        """Which part of those who wait are served before one more request of this tenant."""
        oldest = self._clock() - MAX_SECONDS
        while self._placed:
            placement, (placed_at, _, _) = next(iter(self._placed.items()))
            if len(self._placed) <= MAX_REQUESTS and placed_at >= oldest:
                break
            self.end(placement)
        return self._census.ahead(share)

    def add(self, placement: PlacementKey, share: Share, placed: Placed) -> None:
        """This attempt was placed, or placed again."""
        self.end(placement)
        self._placed[placement] = (self._clock(), share, placed)
        self._census.add(share)

    def end(self, placement: PlacementKey) -> Placed | None:
        """The attempt has ended. Where it was; None if it is not known, or not known any more."""
        found = self._placed.pop(placement, None)
        if found is None:
            return None
        _, share, placed = found
        self._census.remove(share)
        return placed
