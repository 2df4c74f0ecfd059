"""What the end of a worker costs."""

import asyncio

import msgspec
import pytest

from mesh.domain.placement import AttemptOutcome, AttemptReport
from mesh.domain.workers import PromptPace, WorkerIdentity, WorkerLoad, WorkerRole, WorkerState
from scheduler.config import ObjectivesConfig
from scheduler.coordinator import Coordinator
from scheduler.decisions import DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.placement.candidates import Candidates, CandidateWorker
from scheduler.placement.constants import Constants
from scheduler.placement.estimates import paces
from scheduler.scaling.deletion_costs import DeletionCosts, deletion_cost_ms
from scheduler.stores import Stores
from scheduler.tenants import PlacedRequests
from tests.support.registries import make_registry
from tests.support.scheduling import make_candidate, make_identity, make_load, make_query

CONSTANTS = Constants()
IDLE = make_candidate(
    "decode-0", max_requests=64, load=WorkerLoad(exact_prompts=PromptPace(2000.0), decode_step_ms=10.0)
)


def cost(worker: CandidateWorker = IDLE, kept_blocks: int = 0) -> float:
    ((pace,), _) = paces(Candidates([worker]), CONSTANTS)
    return deletion_cost_ms(worker, pace, kept_blocks, output_tokens=100.0, constants=CONSTANTS)


def scheduler_of(*workers: tuple[WorkerIdentity, WorkerLoad]) -> tuple[Coordinator, DeletionCosts]:
    registry, clock = make_registry(CONSTANTS.costs)
    for identity, load in workers:
        registry.update(registry.attach(identity), WorkerState.SERVING, load)
    placed, decisions = PlacedRequests(clock), DecisionLog(1)
    coordinator = Coordinator(
        registry, Stores(), 1, placed, decisions, OutputLengths(), CONSTANTS, ObjectivesConfig(), clock
    )
    return coordinator, DeletionCosts(registry, coordinator, CONSTANTS)


def costs_of(*workers: tuple[WorkerIdentity, WorkerLoad]) -> dict[str, float]:
    """By worker id."""
    _, costs = scheduler_of(*workers)
    return costs.now()


def loaded(**load: int) -> CandidateWorker:
    return msgspec.structs.replace(IDLE, load=msgspec.structs.replace(IDLE.load, **load))


def test_a_worker_with_nothing_costs_nothing() -> None:
    assert cost() == 0


def test_a_stream_costs_the_time_that_it_takes() -> None:
    assert cost(loaded(running_requests=1)) == pytest.approx(100 * 10)
    # Steps of more requests take longer, and each of them waits.
    assert cost(loaded(running_requests=4)) > 4 * 100 * 10


def test_requests_that_wait_count_as_those_that_run() -> None:
    assert cost(loaded(waiting_requests=2)) == cost(loaded(running_requests=2))


def test_schedulers_agree_whoever_placed_the_requests() -> None:
    """Otherwise each would write what the other has just corrected, again and again."""
    workers = [
        (make_identity("decode-0"), make_load(running_requests=3, queued_prefill_tokens=100)),
        (make_identity("decode-1"), make_load(running_requests=1, mean_output_tokens=10.0)),
    ]
    (placing, costs), (_, others) = scheduler_of(*workers), scheduler_of(*workers)
    for number in range(20):
        name = f"request-{number}"
        asyncio.run(placing.place(make_query(name, prompt_tokens=1000)))
        if number % 2:
            placing.report(AttemptReport(name, 0, AttemptOutcome.FINISHED, output_tokens=500))
    assert placing.mean_output_tokens("oracle") == 500
    assert costs.now() == others.now()


def test_a_prefill_worker_costs_its_prompts_and_no_answers() -> None:
    decode = make_identity("decode"), make_load(running_requests=2)
    prefill = make_identity("prefill", role=WorkerRole.PREFILL), make_load(running_requests=2)
    costs = costs_of(decode, prefill)
    assert costs["decode"] > costs["prefill"] == 0


def test_a_stream_costs_an_answer_of_mean_length() -> None:
    short = make_identity("short"), make_load(running_requests=1, mean_output_tokens=10.0)
    long = make_identity("long"), make_load(running_requests=1, mean_output_tokens=1000.0)
    costs = costs_of(short, long)
    assert costs["long"] == pytest.approx(100 * costs["short"])


def test_kv_and_prompts_cost_the_time_of_computing_them() -> None:
    assert cost(kept_blocks=10) == pytest.approx(640 / 2000 * 1000)
    assert cost(loaded(queued_prefill_tokens=640)) == pytest.approx(640 / 2000 * 1000)
