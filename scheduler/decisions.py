"""The last few thousand placements, with their reasons and how they ended."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mesh.domain.placement import AttemptOutcome, PlacementKey, PlacementQuery
from scheduler.placement.choose import Comparison
from scheduler.placement.terms import Terms

# How many of a decision's candidates are shown.
SHOWN_CANDIDATES = 16
# A decision keeps the times of each request that was on the chosen workers, 80 bytes a request. All decisions keep at
# most this many, which is enough for 2,000 decisions on workers with 250 requests.
MOST_REQUESTS = 500_000


@dataclass(slots=True)
class Decision:
    """One call of Place. `outcome` is written once, by DecisionLog.settle."""

    # Seconds since the epoch.
    time: float
    # None if the request was refused.
    chosen: Terms | None
    reason: str
    # The request and the candidates that were compared.
    compared: Comparison
    outcome: AttemptOutcome | None = None

    @property
    def query(self) -> PlacementQuery:
        """What was asked, without the block hashes."""
        return self.compared.request.query

    @property
    def requests(self) -> int:
        """Requests on the chosen worker before. What is compared of other workers is that of earlier decisions."""
        return 0 if self.chosen is None else self.chosen.requests

    @property
    def terms(self) -> Sequence[Terms]:
        """The best of the compared terms, best first. Computed at each call, since few decisions are ever looked at."""
        return self.compared.terms()[:SHOWN_CANDIDATES]


class DecisionLog:
    """A ring of decisions: a new one replaces the oldest, or several where they hold more than MOST_REQUESTS."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._decisions: deque[Decision] = deque()
        # The latest decision on each placement, as long as it is in the ring.
        self._by_key: dict[PlacementKey, Decision] = {}
        self._requests = 0

    def add(self, decision: Decision) -> None:
        self._requests += decision.requests
        while self._decisions and (len(self._decisions) == self._capacity or self._requests > MOST_REQUESTS):
            self._drop_oldest()
        self._decisions.append(decision)
        self._by_key[decision.query.key] = decision

    def settle(self, key: PlacementKey, outcome: AttemptOutcome) -> Decision | None:
        """Record the outcome of a decision. None if it has one already, or has left the ring."""
        decision = self._by_key.get(key)
        if decision is None or decision.chosen is None or decision.outcome is not None:
            return None
        decision.outcome = outcome
        return decision

    def newest(self, limit: int, request_id: str | None = None) -> list[Decision]:
        """At most `limit` decisions, newest first; only those of one request if it is named."""
        return list(islice(self._matching(request_id), limit))

    def _matching(self, request_id: str | None) -> Iterator[Decision]:
        return (d for d in reversed(self._decisions) if request_id is None or d.query.request_id == request_id)

    def _drop_oldest(self) -> None:
        oldest = self._decisions.popleft()
        self._requests -= oldest.requests
        if self._by_key.get(oldest.query.key) is oldest:
            del self._by_key[oldest.query.key]
