import msgspec
import pytest

from mesh.domain.workers import PromptPace, WorkerLoad, WorkerRole
from scheduler.config import ObjectivesConfig, ScalingConfig
from scheduler.placement.candidates import Candidates
from scheduler.placement.constants import Constants
from scheduler.scaling.arrivals import Arrivals, Demand
from scheduler.scaling.needs import needs
from scheduler.scaling.replicas import Need
from tests.support.scheduling import changed, make_candidate

LOAD = WorkerLoad(
    running_requests=10,
    free_blocks=100,
    exact_prompts=PromptPace(2000.0),
    prefill_tokens_per_second=2000.0,
    decode_step_ms=10.2,
)
WORKER = make_candidate("decode-0", max_requests=64, load=LOAD)
# 512 tokens of prompt and 128 of output are 10 blocks.
DEMAND = Demand(prompt_tokens=1500.0, mean_prompt_tokens=512.0)


def needed(
    candidates: Candidates, demand: Demand = DEMAND, objectives: ObjectivesConfig | None = None
) -> dict[WorkerRole, list[Need]]:
    constants = Constants()
    return needs(candidates, demand, 128.0, constants, objectives or ObjectivesConfig(), ScalingConfig())


def test_a_decode_worker_holds_requests_of_mean_length() -> None:
    generations, prompts = needed(Candidates([WORKER]))[WorkerRole.DECODE]
    # The ten that run are expected to take ten of the hundred free blocks.
    assert (generations.amount, generations.per_replica) == (10, 19)
    assert prompts.amount == 1500
    assert prompts.per_replica == pytest.approx(2000)


def test_an_objective_for_tokens_lowers_what_a_worker_holds() -> None:
    # A step takes 10 ms and 0.2 ms a request in addition.
    busy = msgspec.structs.replace(WORKER, load=msgspec.structs.replace(LOAD, decode_step_requests=1.0))
    generations, _ = needed(Candidates([busy]), objectives=ObjectivesConfig(tpot_ms=11.0))[WorkerRole.DECODE]
    assert generations.per_replica == pytest.approx(5, abs=1)


def test_with_prefill_workers_the_prompts_are_theirs() -> None:
    found = needed(Candidates([WORKER], [changed(WORKER, worker_id="prefill-0")]))
    assert [need.what for need in found[WorkerRole.DECODE]] == ["requests at mean output length"]
    assert [need.what for need in found[WorkerRole.PREFILL]] == ["prompt tokens/s"]


def test_prompts_that_wait_longer_than_the_objective_need_more_workers() -> None:
    load = msgspec.structs.replace(LOAD, queued_prefill_tokens=3000)
    waiting = changed(WORKER, worker_id="prefill-0", load=load)
    (prompts,) = needed(Candidates([], [waiting]), objectives=ObjectivesConfig(ttft_ms=2000.0))[WorkerRole.PREFILL]
    # 2000 of them may wait: they are computed within half of the objective.
    assert prompts.amount == pytest.approx(1500 + 1000, rel=0.05)


def test_without_any_worker_refused_requests_are_what_is_needed() -> None:
    found = needed(Candidates([]), Demand(prompt_tokens=500.0, refused_requests=2.0, mean_prompt_tokens=250.0))
    generations = found[WorkerRole.DECODE][0]
    # Two a second, of 128 tokens at 20 ms.
    assert generations.amount == pytest.approx(5.12)
    assert generations.per_replica == 32


def test_one_short_request_is_enough_to_need_a_first_worker() -> None:
    found = needed(Candidates([]), Demand(refused_requests=1e-3, mean_prompt_tokens=1.0))
    assert found[WorkerRole.DECODE][0].amount == 1
    forgotten = needed(Candidates([]), Demand(refused_requests=1e-5, mean_prompt_tokens=1.0))
    assert forgotten[WorkerRole.DECODE][0].replicas < 1e-3


def test_a_draining_worker_counts_for_nothing() -> None:
    draining = changed(WORKER, worker_id="decode-1", unusable="it is draining")
    assert needed(Candidates([WORKER, draining])) == needed(Candidates([WORKER]))


def test_rates_rise_with_arrivals_and_die_out() -> None:
    now = 0.0
    arrivals = Arrivals(lambda: now, 30.0)
    for second in range(200):
        now = float(second)
        arrivals.placed("m", 300, 100)
        arrivals.refused("m", 100)
    demand = arrivals.demand("m")
    assert demand.prompt_tokens == pytest.approx(200, rel=0.05)
    assert demand.refused_requests == pytest.approx(1, rel=0.05)
    assert demand.mean_prompt_tokens == pytest.approx(200)
    now += 300
    assert arrivals.demand("m").prompt_tokens < 0.01
    assert arrivals.demand("another") == Demand()
