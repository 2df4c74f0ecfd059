"""The requests that this scheduler placed and that have not ended: their tenants, and where they are."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from mesh.domain.placement import PlacementKey
from mesh.domain.shares import Census, Share

# If a gateway dies, the outcome of its requests is never reported.
MAX_SECONDS = 600.0
MAX_REQUESTS = 100_000


class Placed(NamedTuple):
    """Where a request was placed, and how long its answer may be."""

    model: str
    worker_ids: tuple[str, ...]
    max_tokens: int


class PlacedRequests:
    """`clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._census = Census()
        # In the order of placement: when, for which tenant, and where.
        self._placed: OrderedDict[PlacementKey, tuple[float, Share, Placed]] = OrderedDict()

    def ahead(self, share: Share) -> float:
        """The fraction of waiting requests that is served before one more request of this tenant."""
        oldest = self._clock() - MAX_SECONDS
        while self._placed:
            placement, (placed_at, _, _) = next(iter(self._placed.items()))
            if len(self._placed) <= MAX_REQUESTS and placed_at >= oldest:
                break
            self.end(placement)
        return self._census.ahead(share)

    def add(self, placement: PlacementKey, share: Share, placed: Placed) -> None:
        """Note that an attempt was placed, or placed again."""
        self.end(placement)
        self._placed[placement] = (self._clock(), share, placed)
        self._census.add(share)

    def end(self, placement: PlacementKey) -> Placed | None:
        """Note that an attempt has ended. Returns where it was; None if it is unknown or forgotten."""
        found = self._placed.pop(placement, None)
        if found is None:
            return None
        _, share, placed = found
        self._census.remove(share)
        return placed
