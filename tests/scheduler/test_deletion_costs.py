"""What the end of a worker costs."""

import msgspec
import pytest

from mesh.domain.workers import KvNamespace, WorkerLoad
from scheduler.candidates import Candidates, CandidateWorker, PlacementKnobs, Unreported
from scheduler.deletion_costs import deletion_cost_ms
from scheduler.estimates import informed

KNOBS = PlacementKnobs()
IDLE = CandidateWorker(
    worker_id="decode-0",
    unusable=None,
    context_tokens=4096,
    total_blocks=1000,
    max_requests=64,
    load=WorkerLoad(prefill_tokens_per_second=2000.0, decode_step_ms=10.0),
    namespace=KvNamespace("f", "oracle", 1, "oracle"),
)


def cost(worker: CandidateWorker = IDLE, kept_blocks: int = 0) -> float:
    (worker,) = informed(Candidates([worker]), KNOBS).decode
    return deletion_cost_ms(worker, kept_blocks, output_tokens=100.0, knobs=KNOBS)


def loaded(**load: int) -> CandidateWorker:
    return msgspec.structs.replace(IDLE, load=msgspec.structs.replace(IDLE.load, **load))


def test_a_worker_with_nothing_costs_nothing() -> None:
    assert cost() == 0


def test_a_stream_costs_the_time_that_it_takes() -> None:
    assert cost(loaded(running_requests=1)) == pytest.approx(100 * 10)
    # Steps of more requests take longer, and each of them waits.
    assert cost(loaded(running_requests=4)) > 4 * 100 * 10


def test_requests_that_wait_or_are_on_their_way_count_as_well() -> None:
    on_their_way = msgspec.structs.replace(IDLE, unreported=Unreported(requests=2))
    assert cost(loaded(waiting_requests=2)) == cost(on_their_way) == cost(loaded(running_requests=2))


def test_kv_and_prompts_cost_the_time_of_computing_them() -> None:
    assert cost(kept_blocks=10) == pytest.approx(640 / 2000 * 1000)
    assert cost(loaded(queued_prefill_tokens=640)) == pytest.approx(640 / 2000 * 1000)
