"""What workers measured, long ago or just now, and what placement makes of it."""

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.targets import StoreTarget
from mesh.domain.workers import PromptPace, TransferCounters, WorkerSpeed
from scheduler.placement.candidates import Candidates, CandidateWorker, MeasurementTimes
from scheduler.placement.constants import Constants
from scheduler.placement.estimates import (
    CONSTANT_AGE_SECONDS,
    HALF_LIFE_SECONDS,
    estimates,
    paces,
    prompt_rates,
)
from scheduler.placement.estimates import measured as measured_of
from scheduler.placement.placed_work import placed_work
from tests.support.scheduling import choose, make_candidate, make_load, make_request, predict_alone

CONSTANTS = Constants()
# Next to nothing to compute: the time of a step decides.
REQUEST = make_request(prompt_tokens=1)
LONG_AGO = 100 * CONSTANT_AGE_SECONDS


def measured(worker_id: str, step_ms: float, age_seconds: float = 0.0) -> CandidateWorker:
    load = make_load(decode_step_ms=step_ms)
    return make_candidate(worker_id, max_requests=64, load=load, measured_at=MeasurementTimes(step=-age_seconds))


# One worker: its class, what it measured, and how long ago.
Told: TypeAlias = tuple[str, float | None, float]


def of(value: float | None, age_seconds: float = 0.0, worker_class: str = "a") -> Told:
    return worker_class, value, age_seconds


def estimated(told: Sequence[Told], constant: float) -> list[float]:
    known = [measured_of(value, -age_seconds, constant) for _, value, age_seconds in told]
    return estimates([name for name, _, _ in told], known, 0.0)


def placed(workers: dict[str, CandidateWorker], count: int) -> Counter[str]:
    """How many of a burst each worker is given."""
    given: Counter[str] = Counter()
    for _ in range(count):
        chosen = choose(predict_alone(REQUEST, workers.values(), CONSTANTS))
        assert chosen is not None
        given[chosen.worker_id] += 1
        worker = workers[chosen.worker_id]
        unreported = worker.unreported + placed_work(REQUEST, chosen, 0.0, CONSTANTS)[chosen.worker_id, 0].load
        workers = {**workers, worker.identity.worker_id: msgspec.structs.replace(worker, unreported=unreported)}
    return given


def simulated(true_ms: dict[str, float], first_told_ms: dict[str, float], seconds: int) -> list[Counter[str]]:
    """A burst of 20 a second, all answered within it; a worker that got some says at once how fast it truly is."""
    told = {name: measured(name, step_ms) for name, step_ms in first_told_ms.items()}
    bursts = []
    for _ in range(seconds):
        bursts.append(placed(told, 20))
        told = {
            name: measured(name, true_ms[name])
            if bursts[-1][name]
            else measured(name, worker.load.decode_step_ms or 0.0, 1 - worker.measured_at.step)
            for name, worker in told.items()
        }
    return bursts


def test_equal_workers_share_each_burst() -> None:
    assert simulated({"a": 10.0, "b": 10.0}, {"a": 10.0, "b": 10.0}, 10) == [Counter(a=10, b=10)] * 10


def test_a_worker_that_once_measured_slow_gets_its_share_again() -> None:
    bursts = simulated({"a": 10.0, "b": 10.0}, {"a": 10.0, "b": 100.0}, 20)
    assert bursts[0] == Counter(a=20)
    assert bursts[-1] == Counter(a=10, b=10)


def test_a_truly_slow_worker_gets_far_fewer_requests() -> None:
    bursts = simulated({"a": 10.0, "b": 100.0}, {"a": 10.0, "b": 100.0}, 120)
    given = sum(bursts, Counter())
    assert 0 < given["b"] < given["a"] / 20
    assert any(burst["b"] for burst in bursts[:30]) and any(burst["b"] for burst in bursts[-30:])


def test_a_fresh_measurement_is_believed_whatever_the_others_found() -> None:
    assert estimated([of(10.0), of(1000.0)], 20.0)[1] == 1000.0


def test_an_old_measurement_gives_way_to_what_the_others_find() -> None:
    _, half_old = estimated([of(10.0), of(1000.0, HALF_LIFE_SECONDS)], 20.0)
    # The others are 10 and, half as much, 1000; half-way from there to 1000, in logarithms.
    common = (10.0 * 10.0 * 1000.0) ** (1 / 3)
    assert half_old == pytest.approx((1000.0 * common) ** 0.5, rel=1e-3)
    assert estimated([of(10.0), of(1000.0, LONG_AGO)], 20.0)[1] == pytest.approx(10.0, rel=1e-3)


def test_a_worker_that_measured_nothing_is_like_those_that_did() -> None:
    assert estimated([of(10.0), of(40.0), of(None)], 1.0)[2] == pytest.approx(20.0, rel=1e-3)


def test_while_nobody_has_measured_the_constant_holds() -> None:
    assert estimated([of(None)], 20.0) == [20.0]


def test_a_measurement_that_is_not_repeated_is_forgotten_within_minutes() -> None:
    """A store that was slow once is asked again."""

    def bandwidth(age_seconds: float) -> float:
        worker = make_candidate(
            transfers=TransferCounters(fetch_bytes_per_second=1e6), measured_at=MeasurementTimes(fetch=-age_seconds)
        )
        candidates = Candidates([worker], stores={worker.identity.kv_namespace: StoreTarget("store", 1)})
        return paces(candidates, CONSTANTS)[0][0].fetch_bytes_per_second

    assert bandwidth(0.0) == 1e6
    assert bandwidth(CONSTANT_AGE_SECONDS / 2) == pytest.approx(1e6, rel=0.15)
    assert bandwidth(2 * CONSTANT_AGE_SECONDS) == pytest.approx(CONSTANTS.costs.fetch_bytes_per_second, rel=0.01)


def first_speed(slower: float) -> WorkerSpeed:
    """What a worker measures that takes `slower` times as long as the cost model says."""
    rate = CONSTANTS.costs.prefill_tokens_per_second / slower
    return WorkerSpeed(CONSTANTS.costs.decode_ms(8) * slower, 8.0, PromptPace(rate, 500.0, 1000.0))


def test_a_new_worker_is_as_fast_as_it_measured_itself() -> None:
    nothing = make_load(prefill_tokens_per_second=None, decode_step_ms=None)
    workers = [make_candidate(f"{slower}", load=nothing, speed=first_speed(slower)) for slower in (0.25, 8.0)]
    found, _ = paces(Candidates(workers), CONSTANTS)
    assert [pace.prompt_slowness for pace in found] == pytest.approx([0.25, 8.0])
    assert [pace.slowness for pace in found] == pytest.approx([0.25, 8.0])


def test_an_idle_worker_is_as_fast_as_at_its_start() -> None:
    long_ago = MeasurementTimes(prefill=-LONG_AGO, step=-LONG_AGO)
    slowed = make_load(prefill_tokens_per_second=10.0, decode_step_ms=9000.0)
    worker = make_candidate(load=slowed, measured_at=long_ago, speed=first_speed(8.0), max_requests=64)
    ((pace,), _) = paces(Candidates([worker]), CONSTANTS)
    assert (pace.prompt_slowness, pace.slowness) == pytest.approx((8.0, 8.0), rel=1e-3)
    rate = prompt_rates(Candidates([worker]), CONSTANTS.costs)["decode-1"]
    assert rate == pytest.approx(CONSTANTS.costs.prefill_tokens_per_second / 8.0, rel=1e-3)


def test_prefill_and_decode_workers_share_the_rate_of_prompts() -> None:
    prefill = make_candidate("p", load=make_load(prefill_tokens_per_second=800.0))
    decode = make_candidate("d", load=make_load(prefill_tokens_per_second=None))
    decode_paces, prefill_paces = paces(Candidates([decode], [prefill]), CONSTANTS)
    slowness = CONSTANTS.costs.prefill_tokens_per_second / 800.0
    assert prefill_paces[0].prompt_slowness == pytest.approx(slowness)
    assert decode_paces[0].prompt_slowness == pytest.approx(slowness, rel=1e-3)


def test_a_worker_without_measurements_is_like_its_class() -> None:
    unknown = [of(None, worker_class=name) for name in ("fast", "slow", "new")]
    found = estimated([of(10.0, 0.0, "fast"), of(30.0, 0.0, "slow"), *unknown], 1.0)
    # One of a class of which nothing is known is like all.
    assert found[2:] == pytest.approx([10.0, 30.0, 300.0**0.5], rel=1e-3)


def test_an_old_measurement_of_a_slower_class_stays() -> None:
    _, slow = estimated([of(10.0, 0.0, "fast"), of(30.0, 10 * HALF_LIFE_SECONDS, "slow")], 20.0)
    assert slow == pytest.approx(30.0, rel=0.01)


values = st.floats(1e-3, 1e12)
measurements = st.tuples(st.sampled_from("abc"), values, st.floats(0, 1e6))


@given(st.lists(measurements, min_size=1, max_size=6), values)
def test_an_estimate_lies_between_what_was_measured_and_the_constant(measurements: list[Told], constant: float) -> None:
    known = [constant, *(value for _, value, _ in measurements if value)]
    for estimate in estimated([*measurements, of(None)], constant):
        assert min(known) * (1 - 1e-9) <= estimate <= max(known) * (1 + 1e-9)
