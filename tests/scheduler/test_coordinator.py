from collections.abc import Sequence
from typing import Any

import pytest

from mesh.blocks import chain_hashes
from mesh.domain.placement import AttemptOutcome, AttemptReport
from mesh.domain.shares import Share
from mesh.domain.workers import PromptPace, RankStatus, TransferCounters, WorkerLoad, WorkerRole, WorkerState
from mesh.errors import ContextExceeded, NoWorker, NoWorkerYet, Overloaded, UnknownModel
from scheduler.config import ObjectivesConfig
from scheduler.coordinator import Coordinator
from scheduler.decisions import SHOWN_CANDIDATES, DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.live_worker import Lease
from scheduler.placement.candidates import Unreported
from scheduler.placement.standings import SMALL_FIELD
from scheduler.stores import Stores
from scheduler.tenants import PlacedRequests
from tests.support.registries import make_registry
from tests.support.scheduling import make_constants, make_identity, make_load, make_query


class Scheduling:
    """A coordinator over a registry, in a time of its own."""

    def __init__(self, gather_seconds: float = 0.0, **config: Any) -> None:
        constants = make_constants(**config)
        self.registry, self.clock = make_registry(constants.costs, gather_seconds=gather_seconds)
        self.decisions = DecisionLog(100)
        self.coordinator = Coordinator(
            self.registry,
            Stores(),
            1,
            PlacedRequests(self.clock),
            self.decisions,
            OutputLengths(),
            constants,
            ObjectivesConfig(),
            self.clock,
        )

    def add_worker(self, worker_id: str, ranks: Sequence[WorkerLoad] = (), **identity: Any) -> Lease:
        """ranks: what each of its ranks reports, if it has several."""
        lease = self.registry.attach(make_identity(worker_id, ranks=len(ranks) or 1, **identity))
        statuses = [RankStatus(load, TransferCounters(), 0) for load in ranks]
        self.registry.update(lease, WorkerState.SERVING, make_load(), ranks=statuses)
        return lease

    async def place(
        self, generation_id: str = "r", attempt: int = 0, block_hashes: Sequence[bytes] = (), **request: Any
    ) -> str:
        query = make_query(generation_id, attempt, block_hashes=block_hashes, **request)
        return (await self.coordinator.place(query)).placement.decode.worker_id

    def report(self, request_id: str, attempt: int, outcome: AttemptOutcome, output_tokens: int) -> bool:
        return self.coordinator.report(AttemptReport(request_id, attempt, outcome, output_tokens))

    @property
    def chosen_rank(self) -> int | None:
        """The rank that the last decision chose."""
        chosen = self.decisions.newest(1)[0].chosen
        assert chosen is not None
        return chosen.rank


async def test_a_placement_weighs_on_its_worker_until_its_outcome() -> None:
    scheduling = Scheduling()
    for name in "ab":
        scheduling.add_worker(name)
    assert [await scheduling.place("r1"), await scheduling.place("r2")] == ["a", "b"]
    assert scheduling.report("r1", 0, AttemptOutcome.CANCELLED, 0)
    assert await scheduling.place("r3") == "a"


async def test_a_quiet_tenant_is_not_refused_for_anothers_requests() -> None:
    scheduling = Scheduling(queue_requests=20)
    scheduling.add_worker("a")
    with pytest.raises(Overloaded):
        for number in range(1000):
            await scheduling.place(f"r{number}", share=Share("busy"))
    assert await scheduling.place("other", share=Share("quiet")) == "a"
    with pytest.raises(Overloaded):
        await scheduling.place("more", share=Share("busy"))


async def test_an_outcome_counts_once() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("a")
    await scheduling.place("r1")
    assert scheduling.report("r1", 0, AttemptOutcome.FINISHED, 5)
    assert not scheduling.report("r1", 0, AttemptOutcome.FINISHED, 5)
    assert not scheduling.report("r1", 1, AttemptOutcome.FINISHED, 5)


async def test_an_outcome_counts_though_the_log_has_forgotten_the_decision() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("a", total_blocks=10_000, max_requests=1000)
    # The log keeps a hundred.
    for number in range(150):
        await scheduling.place(f"r{number}", max_tokens=3000)
    assert scheduling.report("r0", 0, AttemptOutcome.FINISHED, 3000)
    assert not scheduling.report("r0", 0, AttemptOutcome.FINISHED, 3000)
    assert scheduling.coordinator.mean_output_tokens("oracle") == 3000


async def test_only_finished_requests_teach_the_length_of_answers() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("a", total_blocks=1000, max_requests=1000)
    for attempt, (outcome, tokens) in enumerate([(AttemptOutcome.CANCELLED, 10), (AttemptOutcome.FINISHED, 3000)]):
        await scheduling.place("r", attempt, max_tokens=3000)
        scheduling.report("r", attempt, outcome, tokens)
    await scheduling.place("last", max_tokens=3000)
    slots = [decision.terms[0].slots_left for decision in reversed(scheduling.decisions.newest(3))]
    # 640 + 100 tokens that the worker measured are 12 blocks, 640 + 3000 are 57.
    assert slots == [1000 // 12, 1000 // 12, 1000 // 57]


async def test_a_pair_carries_its_work_until_the_outcome() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("d")
    scheduling.add_worker("p", role=WorkerRole.PREFILL)
    await scheduling.place("r1")
    assert [worker.unreported for worker in scheduling.registry.workers()] == [
        Unreported(1, 0, 11),
        Unreported(1, 640, 11),
    ]
    scheduling.report("r1", 0, AttemptOutcome.FINISHED, 5)
    assert [worker.unreported for worker in scheduling.registry.workers()] == [Unreported(), Unreported()]


async def test_requests_of_one_id_are_each_counted() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("d")
    for generation in ("g1", "g2", "g3"):
        await scheduling.place(generation, 1, request_id="the client's")
    (worker,) = scheduling.registry.workers()
    assert worker.unreported.requests == 3
    assert scheduling.report("g2", 1, AttemptOutcome.CANCELLED, 0)
    assert scheduling.registry.workers()[0].unreported.requests == 2
    outcomes = {kept.query.generation_id: kept.outcome for kept in scheduling.decisions.newest(3, "the client's")}
    assert outcomes == {"g1": None, "g2": AttemptOutcome.CANCELLED, "g3": None}


async def test_a_burst_spreads_over_pairs() -> None:
    scheduling = Scheduling()
    for number in range(2):
        scheduling.add_worker(f"d{number}", can_prefill=False)
        scheduling.add_worker(f"p{number}", role=WorkerRole.PREFILL)
    for number in range(8):
        await scheduling.place(f"r{number}")
    assert [worker.unreported.requests for worker in scheduling.registry.workers()] == [4, 4, 4, 4]


async def test_a_prefill_worker_alone_is_no_candidate() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("p", role=WorkerRole.PREFILL)
    with pytest.raises(NoWorker):
        await scheduling.place()


async def test_a_decode_worker_may_need_a_prefill_worker() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("d", can_prefill=False)
    with pytest.raises(NoWorker):
        await scheduling.place()


async def test_a_refusal_is_remembered_with_its_reasons() -> None:
    scheduling = Scheduling(queue_requests=0)
    scheduling.add_worker("a", max_requests=1)
    await scheduling.place("r1")
    with pytest.raises(Overloaded):
        await scheduling.place("r2")
    refused = scheduling.decisions.newest(1)[0]
    assert (refused.query.request_id, refused.chosen) == ("r2", None)
    assert "no slot" in refused.terms[0].rejected
    with pytest.raises(UnknownModel):
        await scheduling.coordinator.place(make_query(model="other"))


async def test_a_decision_remembers_the_best_of_many_candidates() -> None:
    scheduling = Scheduling()
    for number in range(SMALL_FIELD):
        scheduling.add_worker(f"w{number:02}")
    chosen = await scheduling.place(avoid=frozenset({"w00", "w01"}))
    terms = scheduling.decisions.newest(1)[0].terms
    assert len(terms) == SHOWN_CANDIDATES
    assert terms[0].worker_id == chosen == "w02"
    assert all(term.rejection is None for term in terms)


async def test_a_young_scheduler_refuses_nothing_for_good() -> None:
    scheduling = Scheduling(gather_seconds=10.0)
    # What lies between the registry and its server, such as imports, does not count.
    scheduling.clock.now += 20.0
    scheduling.registry.begin_gathering()
    with pytest.raises(NoWorkerYet) as none_known:
        await scheduling.place()
    assert none_known.value.retry_after_ms == 1000
    scheduling.add_worker("small")
    assert await scheduling.place() == "small"
    scheduling.clock.now += 9.75
    scheduling.add_worker("small")
    with pytest.raises(NoWorkerYet) as too_long:
        await scheduling.place(prompt_tokens=100_000)
    assert too_long.value.retry_after_ms == 250
    scheduling.clock.now += 0.25
    with pytest.raises(ContextExceeded):
        await scheduling.place(prompt_tokens=100_000)


async def test_a_worker_is_as_quick_as_its_best_rank() -> None:
    scheduling = Scheduling()
    # Each rank has two places.
    busy, idle = make_load(running_requests=2), make_load()
    scheduling.add_worker("several", [busy, busy, idle, busy])
    lease = scheduling.add_worker("one")
    scheduling.registry.update(lease, WorkerState.SERVING, make_load(queued_prefill_tokens=1000))
    assert (await scheduling.place(), scheduling.chosen_rank) == ("several", 2)


async def test_measurements_do_not_decide_between_a_workers_ranks() -> None:
    scheduling = Scheduling()
    # They step together: the difference is chance, and the worker gives nothing on it.
    paces = [PromptPace(rate, 0.0) for rate in (900.0, 1000.0, 1100.0)]
    scheduling.add_worker("a", [make_load(exact_prompts=pace) for pace in paces])
    await scheduling.place()
    assert scheduling.chosen_rank == 0


async def test_a_prompt_goes_to_the_rank_that_has_its_prefix() -> None:
    scheduling = Scheduling()
    lease = scheduling.add_worker("a", [make_load()] * 3)
    hashes = chain_hashes(range(640))
    scheduling.registry.record_blocks(lease, True, hashes, [], [0b111] * 2 + [0b010] * 8)
    await scheduling.place(block_hashes=hashes)
    assert scheduling.chosen_rank == 1
    scheduling.registry.record_blocks(lease, False, hashes[1:], [], [0b100] * 9)
    await scheduling.place(block_hashes=hashes)
    assert scheduling.chosen_rank == 2


async def test_a_burst_spreads_over_the_ranks_of_a_worker() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("a", [make_load()] * 4)
    for number in range(8):
        await scheduling.place(f"r{number}")
    (worker,) = scheduling.registry.workers()
    assert [rank.unreported.requests for rank in worker.ranks] == [2, 2, 2, 2]
    scheduling.report("r5", 0, AttemptOutcome.FINISHED, 5)
    assert sorted(rank.unreported.requests for rank in worker.ranks) == [1, 2, 2, 2]


async def test_a_rank_has_room_for_its_own_part_alone() -> None:
    scheduling = Scheduling(queue_requests=0)
    scheduling.add_worker("a", [make_load(2), make_load(1), make_load(2), make_load(2)], max_requests=8)
    assert (await scheduling.place("r1"), scheduling.chosen_rank) == ("a", 1)
    with pytest.raises(Overloaded):
        await scheduling.place("r2")


async def test_autoscaling_counts_workers_and_not_their_ranks() -> None:
    scheduling = Scheduling()
    scheduling.add_worker("a", [make_load()] * 4)
    (worker,) = scheduling.coordinator.candidates("oracle").decode
    assert (worker.rank, worker.max_requests) == (None, 8)
