"""What placement compares of a live worker: cached between its reports, and never out of date."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from mesh.costs import CostModel
from mesh.domain.workers import (
    PromptPace,
    RankStatus,
    TransferCounters,
    WorkerIdentity,
    WorkerLoad,
    WorkerRole,
    WorkerState,
)
from scheduler.placement.candidates import CandidateWorker, Unreported
from scheduler.placement.placed_work import Answer, PlacedWork
from tests.support.registries import SETTLE, hashes, make_registry
from tests.support.scheduling import make_identity

COSTS = CostModel(prefill_step_ms=3.0)
CHAIN = hashes(1, 2, 3)
MOST_RANKS = 3


class History:
    """A registry's one worker, and what was reported of it and placed on it."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.registry, self.clock = make_registry(COSTS, seconds=1e9)
        self.ranks = identity.ranks
        self._identity = identity
        self._lease = self.registry.attach(identity)

    def reports(self, state: WorkerState, statuses: Sequence[RankStatus]) -> None:
        first, several = statuses[0], statuses[: self.ranks] if self.ranks > 1 else ()
        self.registry.update(self._lease, state, first.load, first.transfers, several)

    def is_given(self, number: int, rank: int, work: PlacedWork) -> None:
        now = self.clock.now
        work = PlacedWork(
            work.load,
            work.prompt_seconds,
            now + work.comes_at,
            None if work.begins_at is None else now + work.begins_at,
            None if work.answer is None else Answer(*(now + time for time in msgspec.structs.astuple(work.answer))),
        )
        self.registry.add_placement("decode-1", rank % self.ranks, (f"g{number}", 1), work)

    def ends(self, number: int) -> None:
        self.registry.settle_placement("decode-1", (f"g{number}", 1))

    def stores(self, blocks: int, holders: int) -> None:
        held = CHAIN[:blocks]
        masks = [1 + holders % (2**self.ranks - 1)] * len(held) if self.ranks > 1 else []
        self.registry.record_blocks(self._lease, True, held, [], masks)

    def reconnects(self) -> None:
        self.registry.detach(self._lease)
        self._lease = self.registry.attach(self._identity)

    def breaks(self) -> None:
        self.registry.detach(self._lease)

    def waits(self, seconds: float) -> None:
        self.clock.now += seconds

    def candidates(self) -> list[CandidateWorker]:
        """The worker as placement sees it: for two prompts, rank by rank, and as a whole."""
        (worker,) = self.registry.workers()
        chosen = [worker.candidate(tokens, self.registry.holders(CHAIN)) for tokens in (64, 6400)]
        return [*chosen, *(worker.rank_candidate(rank) for rank in range(self.ranks)), worker.whole()]


Event: TypeAlias = Callable[[History], None]


def event(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Event]:
    return st.tuples(*arguments).map(lambda drawn: lambda history: getattr(history, name)(*drawn))


rates = st.sampled_from([None, 900.0, 2000.0])
loads = st.builds(
    WorkerLoad,
    # Few enough that this scheduler may know the ends of all of them.
    running_requests=st.sampled_from([0, 1, 2, 9]),
    waiting_requests=st.sampled_from([0, 0, 1]),
    queued_prefill_tokens=st.sampled_from([0, 700, 9000]),
    free_blocks=st.sampled_from([0, 30, 1000]),
    decode_step_ms=st.sampled_from([None, 10.0, 60.0, 61.0]),
    exact_prompts=st.none() | st.builds(PromptPace, st.just(5000.0), step_tokens=st.none() | st.just(800.0)),
    push_bytes_per_second=rates,
)
statuses = st.lists(
    st.builds(RankStatus, loads, st.builds(TransferCounters, fetch_bytes_per_second=rates), st.just(0)),
    min_size=MOST_RANKS,
    max_size=MOST_RANKS,
)
works = st.builds(
    PlacedWork,
    st.builds(Unreported, st.just(1), st.integers(0, 900), st.integers(0, 15)),
    prompt_seconds=st.sampled_from([0.0, 0.01, 0.3]),
    comes_at=st.sampled_from([0.0, 0.1]),
    begins_at=st.none() | st.sampled_from([0.0, 0.2]),
    answer=st.sampled_from([None, Answer(0.0, 0.25, 0.5), Answer(0.5, 2.0, 4.0)]),
)
requests = st.integers(0, 2)
events = st.one_of(
    event("reports", st.sampled_from(WorkerState), statuses),
    event("is_given", requests, st.integers(0, MOST_RANKS - 1), works),
    event("is_given", requests, st.just(0), works),
    event("ends", requests),
    event("ends", requests),
    event("stores", st.integers(0, len(CHAIN)), st.integers(0, 6)),
    event("reconnects"),
    event("breaks"),
    event("waits", st.sampled_from([0.001, 0.05, SETTLE, 3.0])),
)
identities = st.builds(
    make_identity,
    role=st.sampled_from(WorkerRole),
    ranks=st.integers(1, MOST_RANKS),
    max_requests=st.sampled_from([MOST_RANKS, 12]),
    max_step_tokens=st.sampled_from([1024, 8192]),
    prompt_wait_steps=st.sampled_from([0, 4]),
)


@given(identities, st.lists(events, min_size=8, max_size=20))
def test_what_was_asked_before_does_not_change_a_candidate(identity: WorkerIdentity, events: list[Event]) -> None:
    asked, fresh = History(identity), History(identity)
    for happens in events:
        asked.candidates()
        for history in (asked, fresh):
            happens(history)
    assert asked.candidates() == fresh.candidates()


def test_an_end_counts_after_a_report_with_the_request() -> None:
    history = History(make_identity(max_requests=1))
    history.is_given(0, 0, PlacedWork(Unreported(1, 640, 11), answer=Answer(0.0, 2.0, 4.0)))
    history.waits(SETTLE)
    history.reports(WorkerState.SERVING, [RankStatus(WorkerLoad(running_requests=1), TransferCounters(), 0)])
    assert history.candidates()[0].ends == [history.clock.now - SETTLE + 4.0]
    history.ends(0)
    assert history.candidates()[0].ends == ()
