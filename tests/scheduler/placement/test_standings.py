from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.workers import WorkerRole, WorkerState
from scheduler.placement.standings import LOOKS, SMALL_FIELD, Standing
from scheduler.registry import Registry
from tests.support.registries import make_registry
from tests.support.scheduling import make_identity, make_load

MANY = 3 * SMALL_FIELD


def crowded_registry(workers: int, **identity: object) -> Registry:
    """Worker n runs n requests."""
    registry, _ = make_registry()
    for number in range(workers):
        lease = registry.attach(make_identity(f"w{number:03}", max_requests=1000, **identity))
        registry.update(lease, WorkerState.SERVING, make_load(running_requests=number))
    return registry


def seen(registry: Registry, chain: tuple[bytes, ...] = (), avoided: int = 0) -> list[str]:
    return [worker.lease.worker_id for worker in registry.worth_a_look("oracle", registry.holders(chain), avoided)]


def test_all_workers_of_a_small_mesh_are_worth_a_look() -> None:
    assert len(seen(crowded_registry(SMALL_FIELD))) == SMALL_FIELD


def test_of_many_workers_the_least_used_are() -> None:
    found = seen(crowded_registry(MANY))
    assert {f"w{number:03}" for number in range(LOOKS)} <= set(found)
    assert len(found) <= 2 * LOOKS


def test_those_that_a_request_avoids_do_not_count() -> None:
    assert f"w{LOOKS + 2:03}" in seen(crowded_registry(MANY), avoided=3)


def test_every_worker_gets_its_turn() -> None:
    registry = crowded_registry(MANY)
    assert len({name for _ in range(MANY) for name in seen(registry)}) == MANY


def test_a_worker_that_holds_the_prompt_is_however_busy() -> None:
    registry = crowded_registry(MANY)
    holder = registry.attach(make_identity("w070", max_requests=1000))
    registry.record_blocks(holder, False, [b"a" * 16, b"b" * 16], [])
    assert "w070" in seen(registry, (b"a" * 16, b"b" * 16))
    assert "w070" not in seen(registry, (b"c" * 16,))


def test_each_role_and_each_namespace_has_its_own_least_used() -> None:
    registry = crowded_registry(MANY)
    for number in range(MANY):
        lease = registry.attach(make_identity(f"p{number:03}", role=WorkerRole.PREFILL))
        registry.update(lease, WorkerState.SERVING, make_load(queued_prefill_tokens=1000 - number))
    assert {f"p{MANY - 1:03}", "w000"} <= set(seen(registry))


def test_a_worker_that_drains_or_is_lost_comes_last() -> None:
    registry = crowded_registry(MANY)
    lease = registry.attach(make_identity("w000", max_requests=1000))
    registry.update(lease, WorkerState.DRAINING, make_load())
    lost = registry.attach(make_identity("w001", max_requests=1000))
    registry.detach(lost)
    assert not {"w000", "w001"} & set(seen(registry))


@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from([0.0, 0.5, 1.0, None])), max_size=200))
def test_a_standing_keeps_every_member_once_in_order(changes: list[tuple[int, float | None]]) -> None:
    standing, model = Standing(), dict[int, float]()
    for worker, use in changes:
        if use is None:
            standing.remove(worker)
            model.pop(worker, None)
        else:
            standing.place(worker, 1 << worker, use)
            model[worker] = use
    ordered = sorted(model, key=lambda worker: (model[worker], worker))
    assert len(standing) == len(model)
    assert standing.members == sum(1 << worker for worker in model)
    assert [*standing.looks(0)][:LOOKS] == ordered[:LOOKS]


def test_the_compared_workers_are_nearly_the_best() -> None:
    random = Random(1)
    registry, _ = make_registry()
    for number in range(300):
        lease = registry.attach(make_identity(f"w{number:03}", max_requests=64))
        load = make_load(running_requests=random.randrange(64), decode_step_ms=random.uniform(9, 11))
        registry.update(lease, WorkerState.SERVING, load)
    least = min(worker.load.running_requests for worker in registry.workers())
    chosen = registry.worth_a_look("oracle", registry.holders(()), 0)
    assert min(worker.load.running_requests for worker in chosen) == least
