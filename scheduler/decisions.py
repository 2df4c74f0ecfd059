"""The last few thousand placements, with their reasons and how they ended."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mesh.domain.placement import AttemptOutcome, PlacementKey, PlacementQuery
from scheduler.placement.choose import Comparison
from scheduler.placement.growth import PlacedAnswers
from scheduler.placement.terms import Terms

# How many of a decision's candidates are shown.
SHOWN_CANDIDATES = 16
# A decision keeps the times of all answers on the workers that were compared, 32 bytes an answer; decisions in between
# which nothing changed on a worker share them. All decisions keep at most this many, which is enough for 2,000
# decisions on workers with 250 answers.
MOST_ANSWERS = 500_000


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
    def answers(self) -> list[PlacedAnswers]:
        """The answers on each of the compared workers."""
        return [worker.answers for worker in self.compared.candidates.decode]

    @property
    def terms(self) -> Sequence[Terms]:
        """The best of the compared terms, best first. Computed at each call, since few decisions are ever looked at."""
        return self.compared.terms()[:SHOWN_CANDIDATES]


class DecisionLog:
    """A ring of decisions: a new one replaces the oldest, or several where they hold more than MOST_ANSWERS."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._decisions: deque[Decision] = deque()
        # The latest decision on each placement, as long as it is in the ring.
        self._by_key: dict[PlacementKey, Decision] = {}
        # How many decisions keep the same answers, by their id, and how many answers all decisions keep.
        self._keepers: dict[int, int] = {}
        self._answers = 0

    def add(self, decision: Decision) -> None:
        self._keep(decision)
        while self._decisions and (len(self._decisions) == self._capacity or self._answers > MOST_ANSWERS):
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
        self._let_go(oldest)
        if self._by_key.get(oldest.query.key) is oldest:
            del self._by_key[oldest.query.key]

    def _keep(self, decision: Decision) -> None:
        for answers in decision.answers:
            keepers = self._keepers.get(id(answers), 0)
            self._keepers[id(answers)] = keepers + 1
            if not keepers:
                self._answers += len(answers)

    def _let_go(self, decision: Decision) -> None:
        for answers in decision.answers:
            keepers = self._keepers.pop(id(answers)) - 1
            if keepers:
                self._keepers[id(answers)] = keepers
            else:
                self._answers -= len(answers)
