import asyncio

import pytest

from mesh.domain.workers import PromptPace, RankStatus, TransferCounters, WorkerLoad, WorkerState
from mesh.errors import InvalidRequest, LeaseConflict, LeaseExpired, Overloaded
from scheduler.placement.candidates import MeasurementTimes, Unreported
from scheduler.placement.placed_work import PlacedWork
from scheduler.registry import MAX_KNOWN_MODELS, Registry
from tests.support.registries import LEASE, SETTLE, hashes, make_registry
from tests.support.scheduling import make_identity, make_load
from tests.support.waiting import PATIENCE_SECONDS


def live(registry: Registry) -> list[tuple[str, str]]:
    return [(worker.identity.worker_id, worker.identity.incarnation) for worker in registry.workers()]


def test_a_lease_ends_when_it_is_not_renewed() -> None:
    registry, clock = make_registry()
    registry.attach(make_identity("a"))
    clock.now += LEASE - 0.001
    assert live(registry) == [("a", "first")]
    clock.now += 0.001
    assert live(registry) == []


def test_each_status_renews_the_lease() -> None:
    registry, clock = make_registry()
    lease = registry.attach(make_identity("a"))
    for _ in range(5):
        clock.now += LEASE - 1
        registry.update(lease, WorkerState.SERVING, make_load())
    assert live(registry) == [("a", "first")]


def test_a_broken_stream_does_not_end_the_lease() -> None:
    registry, clock = make_registry()
    registry.detach(registry.attach(make_identity("a")))
    clock.now += LEASE - 1
    assert live(registry) == [("a", "first")]
    clock.now += 1
    assert live(registry) == []


def test_a_worker_that_returns_keeps_blocks_until_its_snapshot() -> None:
    registry, _ = make_registry()
    lease = registry.attach(make_identity("a"))
    registry.record_blocks(lease, True, hashes(1, 2), [])
    registry.detach(lease)
    again = registry.attach(make_identity("a"))
    assert set(registry.workers()[0].cached) == set(hashes(1, 2))
    registry.record_blocks(again, True, hashes(3), [])
    assert set(registry.workers()[0].cached) == set(hashes(3))


def test_a_restarted_worker_takes_over_at_once_and_holds_nothing() -> None:
    registry, _ = make_registry()
    lease = registry.attach(make_identity("a"))
    registry.record_blocks(lease, True, hashes(1, 2), [])
    registry.detach(lease)
    registry.attach(make_identity("a", incarnation="second"))
    assert live(registry) == [("a", "second")]
    assert set(registry.workers()[0].cached) == set()


def test_a_second_live_process_of_one_id_is_refused() -> None:
    registry, _ = make_registry()
    registry.attach(make_identity("a"))
    with pytest.raises(LeaseConflict, match="give each worker its own worker_id"):
        registry.attach(make_identity("a", incarnation="second"))
    assert live(registry) == [("a", "first")]


def test_a_frozen_holder_loses_its_id_with_its_lease() -> None:
    registry, clock = make_registry()
    old = registry.attach(make_identity("a"))
    clock.now += LEASE
    registry.attach(make_identity("a", incarnation="second"))
    assert live(registry) == [("a", "second")]
    with pytest.raises(LeaseExpired):
        registry.update(old, WorkerState.SERVING, make_load())


def test_a_newer_stream_of_one_incarnation_replaces_the_older() -> None:
    registry, _ = make_registry()
    old = registry.attach(make_identity("a"))
    new = registry.attach(make_identity("a"))
    with pytest.raises(LeaseExpired):
        registry.update(old, WorkerState.SERVING, make_load())
    registry.detach(old)
    assert registry.workers()[0].connected
    registry.update(new, WorkerState.SERVING, make_load())


def test_membership_and_state_raise_the_version_and_loads_do_not() -> None:
    registry, clock = make_registry()
    versions = [registry.version]

    def changed() -> bool:
        versions.append(registry.version)
        return versions[-1] > versions[-2]

    lease = registry.attach(make_identity("a"))
    assert changed()
    registry.update(lease, WorkerState.SERVING, make_load(running_requests=5))
    assert not changed()
    registry.update(lease, WorkerState.DRAINING, make_load())
    assert changed()
    clock.now += LEASE
    registry.expire()
    assert changed()


async def test_watchers_wake_at_a_change() -> None:
    registry, _ = make_registry()
    waiting = [asyncio.create_task(registry.changed(registry.version)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    registry.attach(make_identity("a"))
    assert await asyncio.gather(*waiting) == [1, 1, 1]


async def test_a_lease_that_ends_with_nobody_asking_wakes_watchers() -> None:
    registry, clock = make_registry()
    registry.attach(make_identity("a"))
    expiry = asyncio.create_task(registry.expire_forever(0.001))
    waiting = asyncio.create_task(registry.changed(registry.version))
    clock.now += LEASE
    assert await asyncio.wait_for(waiting, PATIENCE_SECONDS) == 2
    expiry.cancel()


def test_a_model_stays_known_after_its_last_worker() -> None:
    registry, clock = make_registry()
    registry.attach(make_identity("a", model="m"))
    clock.now += LEASE
    assert registry.serving_model("m") == []
    assert registry.knows_model("m")
    assert not registry.knows_model("n")


def test_the_registry_is_bounded() -> None:
    registry, _ = make_registry(max_workers=2, max_cached_blocks=3)
    first = registry.attach(make_identity("a", model="m1"))
    second = registry.attach(make_identity("b", model="m2"))
    with pytest.raises(Overloaded):
        registry.attach(make_identity("c"))
    registry.record_blocks(first, True, hashes(1, 2), [])
    registry.record_blocks(second, True, hashes(1, 2), [])
    assert [len(worker.cached) for worker in registry.workers()] == [2, 1]
    registry.record_blocks(first, False, [], hashes(1))
    registry.record_blocks(second, False, hashes(5), [])
    assert [len(worker.cached) for worker in registry.workers()] == [1, 2]


def test_the_model_that_left_longest_ago_is_forgotten() -> None:
    registry, _ = make_registry()
    for number in range(MAX_KNOWN_MODELS + 1):
        registry.leave(registry.attach(make_identity(model=f"m{number}")))
    assert not registry.knows_model("m0")
    assert registry.knows_model("m1")


def test_a_measurement_ages_from_its_last_change() -> None:
    registry, clock = make_registry()
    lease = registry.attach(make_identity("a"))

    def changed_at(
        seconds: float,
        rate: float,
        step_ms: float,
        bandwidth: float,
        push: float = 1e9,
        disk: float = 1e8,
        sparse: float = 1e3,
    ) -> MeasurementTimes:
        clock.now += seconds
        load = make_load(
            prefill_tokens_per_second=500.0,
            exact_prompts=PromptPace(rate),
            sparse_prompts=PromptPace(sparse),
            decode_step_ms=step_ms,
            push_bytes_per_second=push,
        )
        rates = TransferCounters(fetch_bytes_per_second=bandwidth, disk_fetch_bytes_per_second=disk)
        registry.update(lease, WorkerState.SERVING, load, rates)
        return registry.workers()[0].whole().measured_at

    def times(
        prefill: float, step: float, fetch: float, push: float, disk_fetch: float, sparse: float = 1
    ) -> MeasurementTimes:
        return MeasurementTimes(*(start + each for each in (prefill, step, fetch, push, disk_fetch, sparse)))

    start = clock.now
    assert changed_at(1, 1000.0, 10.0, 1e6) == times(1, 1, 1, 1, 1)
    assert changed_at(9, 1000.0, 10.0, 1e6) == times(1, 1, 1, 1, 1)
    assert changed_at(9, 1001.0, 10.0, 1e6) == times(19, 1, 1, 1, 1)
    assert changed_at(9, 1001.0, 11.0, 1e6) == times(19, 28, 1, 1, 1)
    assert changed_at(9, 1001.0, 11.0, 2e6) == times(19, 28, 37, 1, 1)
    assert changed_at(9, 1001.0, 11.0, 2e6, push=2e9) == times(19, 28, 37, 46, 1)
    assert changed_at(9, 1001.0, 11.0, 2e6, push=2e9, disk=2e8) == times(19, 28, 37, 46, 55)
    assert changed_at(9, 1001.0, 11.0, 2e6, push=2e9, disk=2e8, sparse=2e3) == times(19, 28, 37, 46, 55, 64)


def test_a_placement_counts_until_a_status_can_contain_it() -> None:
    registry, clock = make_registry()
    lease = registry.attach(make_identity("a"))
    registry.add_placement("a", 0, ("r", 0), PlacedWork(Unreported(1, 640, 11)))
    clock.now += SETTLE / 2
    registry.update(lease, WorkerState.SERVING, make_load())
    assert registry.workers()[0].unreported == Unreported(1, 640, 11)
    clock.now += SETTLE
    assert registry.workers()[0].unreported == Unreported(1, 640, 11)
    registry.update(lease, WorkerState.SERVING, make_load())
    assert registry.workers()[0].unreported == Unreported()


def test_a_placement_that_ended_counts_no_longer() -> None:
    registry, _ = make_registry()
    registry.attach(make_identity("a"))
    registry.add_placement("a", 0, ("r", 0), PlacedWork(Unreported(1, 640, 11)))
    registry.add_placement("a", 0, ("r", 1), PlacedWork(Unreported(1, 64, 2)))
    registry.add_placement("a", 0, ("r", 1), PlacedWork(Unreported(1, 64, 2)))
    for worker_id in ("a", "a", "gone"):
        registry.settle_placement(worker_id, ("r", 0))
    assert registry.workers()[0].unreported == Unreported(1, 64, 2)


def test_a_worker_has_to_report_each_of_its_ranks() -> None:
    registry, _ = make_registry()
    lease = registry.attach(make_identity("a", ranks=2))
    with pytest.raises(InvalidRequest, match="has 2 ranks, and reports 1"):
        registry.update(lease, WorkerState.SERVING, make_load(), ranks=[RankStatus(make_load(), TransferCounters(), 0)])
    assert registry.workers()[0].load == WorkerLoad()
