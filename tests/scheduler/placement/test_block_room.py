"""How long a request waits for KV blocks on a worker whose pool is short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mesh.costs import CostModel
from mesh.domain.workers import RankStatus, TransferCounters, WorkerState
from scheduler.placement.candidates import CandidateWorker, PlacementRequest, Unreported
from scheduler.placement.placed_work import PlacedWork
from scheduler.placement.terms import Terms
from scheduler.placement.times import batch
from tests.support.registries import make_registry
from tests.support.scheduling import (
    make_candidate,
    make_constants,
    make_identity,
    make_load,
    make_request,
    predict_alone,
)

# Steps take 20 ms, however many requests they have.
CONSTANTS = make_constants(costs=CostModel(decode_steps=((1.0, 20.0),)))
NOTHING = Unreported()
# Its prompt takes 11 blocks with the first token.
REQUEST = make_request(mean_output_tokens=64.0)


def short(
    running: int, free: int, unreported: Unreported = NOTHING, waiting: int = 0, taken: int = 0
) -> CandidateWorker:
    """A worker with a hundred blocks and places by far; `waiting` requests take this many blocks."""
    load = make_load(running, free_blocks=free, waiting_requests=waiting, waiting_blocks=taken, decode_step_ms=20.0)
    return make_candidate(total_blocks=100, max_requests=50, load=load, unreported=unreported)


def predicted(candidate: CandidateWorker, request: PlacementRequest = REQUEST) -> Terms:
    (terms,) = predict_alone(request, [candidate], CONSTANTS)
    return terms


def wait_ms(candidate: CandidateWorker) -> float:
    return predicted(candidate).ttft_ms - predicted(make_candidate(total_blocks=100)).ttft_ms


def ends_ms(ends: float, running: float) -> float:
    """One of those that run ends every so often, and a step's end is half a step away."""
    return ends * 64 * 20 / running - 10


def test_a_request_waits_while_others_need_blocks_to_grow() -> None:
    # Half a step is left of the one that runs.
    assert wait_ms(short(running=5, free=16)) == pytest.approx(10)
    # Five of 17 blocks each, of which half a block has grown; a sixteenth of one's is lacking.
    assert wait_ms(short(running=5, free=15)) == pytest.approx(max(10, ends_ms(1 / 16.5, 5)))
    assert wait_ms(short(running=5, free=5)) == pytest.approx(ends_ms(11 / (95 / 5 - 0.5), 5))


def test_requests_that_wait_get_all_their_blocks_first() -> None:
    """A short prompt queued after a long one: there is room for it, and it does not overtake."""
    alone, queued = short(running=5, free=40), short(running=5, free=40, waiting=1, taken=60)
    assert wait_ms(alone) == pytest.approx(10)
    assert wait_ms(queued) == pytest.approx(ends_ms((11 + 60 + 6 - 40) / (60 / 5 - 0.5), running=5 + 34 / 60))


def test_those_placed_since_the_report_wait_too() -> None:
    placed = short(running=5, free=40, unreported=Unreported(1, 0, 60))
    assert wait_ms(placed) == wait_ms(short(running=5, free=40, waiting=1, taken=60))


def test_requests_that_wait_for_blocks_neither_decode_nor_end() -> None:
    """Twenty that wait make nothing quicker: one of five ends as often as before."""
    few, many = short(5, 5, waiting=1, taken=10), short(5, 5, waiting=20, taken=200)
    assert batch(few) == batch(many) == 5
    # Each lacks its blocks and one to grow by.
    assert wait_ms(many) - wait_ms(few) == pytest.approx(19 * 11 / 18.5 * 64 * 20 / 5, rel=0.01)


def test_a_short_prompt_waits_for_the_answers_of_others() -> None:
    brief = make_request(mean_output_tokens=64.0, max_tokens=1)
    assert predicted(short(5, 5), brief).wait_ms == predicted(short(5, 5)).wait_ms


shorts = st.builds(
    short,
    running=st.integers(0, 20),
    free=st.integers(0, 100),
    unreported=st.builds(Unreported, st.integers(0, 5), st.just(0), st.integers(0, 60)),
    waiting=st.integers(0, 20),
    taken=st.integers(0, 200),
)


@given(shorts, st.integers(0, 100))
def test_more_blocks_never_delay_the_first_token(candidate: CandidateWorker, more: int) -> None:
    """The larger of two pools in which requests hold equally much is not slower."""
    load = structs.replace(candidate.load, free_blocks=candidate.load.free_blocks + more)
    larger = structs.replace(candidate, total_blocks=100 + more, load=load)
    assert predicted(larger).ttft_ms <= predicted(candidate).ttft_ms + 1e-6


@given(shorts, st.integers(0, 100))
def test_blocks_that_others_wait_for_bring_no_token_forward(candidate: CandidateWorker, more: int) -> None:
    placed = structs.replace(candidate.unreported, blocks=candidate.unreported.blocks + more)
    assert predicted(candidate).ttft_ms <= predicted(structs.replace(candidate, unreported=placed)).ttft_ms + 1e-6


@given(shorts)
def test_nobody_waits_for_more_ends_than_there_are_requests(candidate: CandidateWorker) -> None:
    terms = predicted(candidate)
    assert terms.wait_ms <= candidate.requests * terms.drain_ms + terms.tpot_ms


@pytest.mark.parametrize(("waiting_blocks", "expected"), [(0, 0), (20, 0), (50, 1)])
def test_a_rank_is_named_whose_waiting_requests_leave_blocks(waiting_blocks: int, expected: int) -> None:
    """The first has less to do. Its pool is half full; what waits there comes before this request."""
    registry, _ = make_registry()
    lease = registry.attach(make_identity("w", ranks=2, total_blocks=200, max_requests=100))
    waiting = make_load(5, free_blocks=50, waiting_requests=1 if waiting_blocks else 0, waiting_blocks=waiting_blocks)
    loads = [waiting, make_load(8, free_blocks=50)]
    registry.update(
        lease, WorkerState.SERVING, loads[0], None, [RankStatus(load, TransferCounters(), 0) for load in loads]
    )
    (worker,) = registry.workers()
    assert worker.candidate(640, registry.holders([])).rank == expected


def test_a_rank_with_blocks_after_the_latest_placements_is_named() -> None:
    registry, _ = make_registry()
    lease = registry.attach(make_identity("w", ranks=2, total_blocks=200, max_requests=100))
    loads = [make_load(5, free_blocks=50), make_load(8, free_blocks=50)]
    registry.update(
        lease, WorkerState.SERVING, loads[0], None, [RankStatus(load, TransferCounters(), 0) for load in loads]
    )
    (worker,) = registry.workers()
    assert worker.candidate(640, registry.holders([])).rank == 0
    registry.add_placement("w", 0, ("r", 0), PlacedWork(Unreported(1, 0, 35)))
    assert worker.candidate(640, registry.holders([])).rank == 1
