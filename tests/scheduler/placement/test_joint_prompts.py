"""When a prompt begins on a worker of several DP ranks, and how reports correct what placements foretold."""

from typing import Any

import pytest
from msgspec import structs

from mesh.costs import CostModel
from mesh.domain.workers import RankStatus, TransferCounters, WorkerRole, WorkerState
from scheduler.placement.candidates import Candidates, CandidateWorker, Unreported
from scheduler.placement.placed_work import PlacedWork, placed_work
from scheduler.placement.predict import predict
from scheduler.placement.prompts import JointPrompts
from scheduler.registry import Registry
from tests.support.registries import make_registry
from tests.support.scheduling import (
    make_candidate,
    make_constants,
    make_identity,
    make_load,
    make_request,
    predict_alone,
)

# A prompt of 2,000 tokens takes 2 s and two steps; others wait 0.3 s for theirs.
TOKEN_SECONDS, STEP_TOKENS, WAIT_SECONDS = 0.001, 1000, 0.3
RATE = 1 / TOKEN_SECONDS
COSTS = CostModel(decode_steps=((1.0, 10.0),), prefill_tokens_per_second=RATE)


def begins_at(comes_at: float, begin_at: float, end_at: float, others_wait: bool = False) -> float:
    joint = JointPrompts(begin_at, end_at, others_wait, STEP_TOKENS, wait_steps=30)
    return joint.begins_at(comes_at, comes_at + 0.005, TOKEN_SECONDS * STEP_TOKENS, WAIT_SECONDS)


@pytest.mark.parametrize(
    ("comes_at", "expected"),
    [
        pytest.param(9.8, 10.0, id="with those that wait"),
        pytest.param(9.999, 10.004, id="not before a step has ended"),
        pytest.param(10.4, 11.0, id="with the next step of a prompt that goes on"),
        pytest.param(11.4, 12.3, id="for others, once the last step of the prompts is over"),
        pytest.param(12.1, 12.405, id="for others, soon after prompts"),
        pytest.param(12.31, 12.315, id="for no prompt, where none has come for long"),
    ],
)
def test_a_prompt_waits(comes_at: float, expected: float) -> None:
    assert begins_at(comes_at, begin_at=10.0, end_at=12.0) == pytest.approx(expected)


def test_the_prompt_for_which_all_others_wait_begins_at_once() -> None:
    assert begins_at(9.8, begin_at=10.0, end_at=12.0, others_wait=True) == pytest.approx(9.805)


def first_token_ms(**changes: Any) -> float:
    """What is predicted of a prompt of 640 tokens, on a rank without requests whose other rank decodes."""
    candidate = make_candidate(rank=0, load=make_load(prefill_tokens_per_second=RATE), others_requests=1, **changes)
    (terms,) = predict_alone(make_request(), [candidate], make_constants(COSTS))
    return terms.ttft_ms


@pytest.mark.parametrize("begin_at", [-0.15, 0.2])
def test_few_tokens_behind_cached_blocks_wait_for_no_other_rank(begin_at: float) -> None:
    waits_for_none = JointPrompts(-1.0, -0.1, False, STEP_TOKENS, wait_steps=0)
    waits = JointPrompts(begin_at, begin_at + 0.1, False, STEP_TOKENS, wait_steps=20)
    # One of ten blocks is left to compute. Three are too many.
    few = {joint: first_token_ms(joint_prompts=joint, cached_blocks=9) for joint in (waits, waits_for_none)}
    assert few[waits] == few[waits_for_none] < 100
    many = {joint: first_token_ms(joint_prompts=joint, cached_blocks=7) for joint in (waits, waits_for_none)}
    assert many[waits] > many[waits_for_none] + 90


@pytest.mark.parametrize("begin_at", [-0.15, 0.2])
def test_a_prompt_that_all_ranks_compute_waits_for_none(begin_at: float) -> None:
    waits_for_none = JointPrompts(-1.0, -0.1, False, STEP_TOKENS, wait_steps=0)
    divided, whole = (
        JointPrompts(begin_at, begin_at + 0.1, False, STEP_TOKENS, wait_steps=20, divided_tokens=tokens)
        for tokens in (640, 641)
    )
    soon, late, at_once = (first_token_ms(joint_prompts=joint) for joint in (divided, whole, waits_for_none))
    assert soon == at_once and late > soon + 90


def test_a_placement_of_few_tokens_leaves_when_prompts_begin() -> None:
    registry, clock, _ = several()
    place(registry, 0, clock.now + 0.3)
    before = joint(registry)
    few = PlacedWork(Unreported(1, 30, 1), 0.03, begins_at=None)
    registry.add_placement("w", 1, ("few", 0), few)
    assert (joint(registry).begin_at, joint(registry).end_at) == (before.begin_at, before.end_at)
    constants, request = make_constants(COSTS), make_request()
    for cached, begins in ((9, False), (7, True)):
        (terms,) = predict_alone(request, [make_candidate(rank=0, cached_blocks=cached)], constants)
        (work,) = placed_work(request, terms, 0.0, constants).values()
        assert (work.begins_at is not None) == begins


def test_the_wait_for_other_ranks_delays_the_first_token() -> None:
    waits_for_none = JointPrompts(-1.0, -0.1, False, STEP_TOKENS, wait_steps=0)
    waits = JointPrompts(-1.0, -0.1, False, STEP_TOKENS, wait_steps=20)
    assert first_token_ms(joint_prompts=waits) == pytest.approx(first_token_ms(joint_prompts=waits_for_none) + 200)


def several(role: WorkerRole = WorkerRole.DECODE, ranks: int = 2, **changes: Any) -> tuple[Registry, Any, Any]:
    registry, clock = make_registry(COSTS)
    identity = make_identity("w", role=role, ranks=ranks, max_step_tokens=STEP_TOKENS, prompt_wait_steps=30, **changes)
    return registry, clock, registry.attach(identity)


def candidates(registry: Registry) -> list[CandidateWorker]:
    (worker,) = registry.workers()
    return [worker.rank_candidate(rank) for rank in range(len(worker.ranks))]


def joint(registry: Registry, rank: int = 0) -> JointPrompts:
    found = candidates(registry)[rank].joint_prompts
    assert found is not None
    return found


def place(registry: Registry, rank: int, begins_at: float, seconds: float = 2.0) -> None:
    work = PlacedWork(Unreported(1, int(seconds * RATE), 1), seconds, begins_at=begins_at)
    registry.add_placement("w", rank, (f"{rank} {begins_at}", 0), work)


def report(registry: Registry, lease: Any, *ranks: tuple[int, int]) -> None:
    """For each rank: how many requests wait, and tokens of prompts."""
    loads = [
        make_load(1, waiting_requests=waiting, queued_prefill_tokens=tokens, prefill_tokens_per_second=RATE)
        for waiting, tokens in ranks
    ]
    statuses = [RankStatus(load, TransferCounters(), 0) for load in loads]
    registry.update(lease, WorkerState.SERVING, loads[0], None, statuses)


def test_placed_prompts_wait_together_and_end_with_the_longest() -> None:
    registry, clock, _ = several()
    start = clock.now
    place(registry, 0, start + 0.3)
    place(registry, 1, start + 0.3, seconds=3.0)
    found = joint(registry)
    assert (found.begin_at, found.end_at) == (start + 0.3, start + 3.3)
    assert found.others_wait


def test_those_that_begin_behind_them_are_the_next() -> None:
    registry, clock, _ = several()
    start = clock.now
    place(registry, 0, start)
    clock.now += 1.5
    place(registry, 1, start + 2.3)
    assert (joint(registry).begin_at, joint(registry).end_at) == (start + 2.3, start + 4.3)


def test_a_prompt_that_joins_others_under_way_leaves_their_beginning() -> None:
    registry, clock, _ = several()
    start = clock.now
    place(registry, 0, start)
    place(registry, 1, start + 1.0)
    assert (joint(registry).begin_at, joint(registry).end_at) == (start, start + 3.0)


def test_a_reported_prompt_that_waits_is_not_under_way() -> None:
    registry, clock, lease = several()
    start = clock.now
    place(registry, 0, start + 0.3)
    for _ in range(3):
        clock.now += 0.05
        report(registry, lease, (1, 2000), (0, 0))
    assert (joint(registry).begin_at, joint(registry).end_at) == pytest.approx((start + 0.3, start + 2.3))


def test_prompts_that_nobody_reports_any_more_have_ended() -> None:
    registry, clock, lease = several()
    start = clock.now
    place(registry, 0, start + 0.3)
    clock.now += 0.1
    report(registry, lease, (1, 2000), (0, 0))
    clock.now += 1.0
    report(registry, lease, (0, 0), (0, 0))
    ended = clock.now
    clock.now += 1.0
    report(registry, lease, (0, 0), (0, 0))
    assert joint(registry).end_at == ended


def test_prompts_that_began_early_are_under_way_once_none_waits() -> None:
    registry, clock, lease = several()
    place(registry, 0, clock.now + 5.0)
    clock.now += 0.1
    report(registry, lease, (1, 2000), (0, 0))
    clock.now += 1.0
    report(registry, lease, (0, 1000), (0, 0))
    assert (joint(registry).begin_at, joint(registry).end_at) == pytest.approx((clock.now, clock.now + 1.0))


def test_on_a_prefill_worker_a_prompt_waits_for_one_step() -> None:
    registry, clock, _ = several(WorkerRole.PREFILL)
    place(registry, 0, clock.now)
    assert joint(registry, 1).wait_steps == 0
    constants = make_constants(structs.replace(COSTS, handover_ms=0.0))
    found = Candidates([make_candidate(can_prefill=False)], candidates(registry), now=clock.now + 0.4)
    (terms,) = predict(make_request(), found, constants)
    # It begins with the second step of the other rank's prompt.
    assert terms.prefill_rank == 1
    assert terms.ttft_ms == pytest.approx(600 + 640)


def test_prompts_of_a_single_rank_wait_for_no_others() -> None:
    registry, _ = make_registry(COSTS)
    registry.attach(make_identity("w", ranks=1, max_step_tokens=STEP_TOKENS, prompt_wait_steps=30))
    assert all(each.joint_prompts is None for each in candidates(registry))
