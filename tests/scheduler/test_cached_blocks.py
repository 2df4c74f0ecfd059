from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.workers import MAX_RANKS, HostTierStatus, RankStatus, TransferCounters, WorkerState
from scheduler.live_worker import Lease
from scheduler.registry import Registry
from tests.support.registries import LEASE, hashes, held_of, make_registry
from tests.support.scheduling import make_identity, make_load


def test_the_room_of_a_lost_worker_is_given_back() -> None:
    registry, clock = make_registry(max_cached_blocks=2)
    registry.record_blocks(registry.attach(make_identity("a")), True, hashes(1, 2), [])
    clock.now += LEASE
    registry.record_blocks(registry.attach(make_identity("b")), True, hashes(3, 4), [])
    assert set(registry.workers()[0].cached) == set(hashes(3, 4))


def test_a_worker_cannot_claim_more_blocks_than_it_has() -> None:
    registry, _ = make_registry()
    lease = registry.attach(make_identity("a", total_blocks=2))
    registry.record_blocks(lease, True, hashes(*range(10)), [])
    assert len(registry.workers()[0].cached) == 2


def test_a_cached_prefix_ends_at_the_first_missing_block() -> None:
    registry, _ = make_registry()
    registry.record_blocks(registry.attach(make_identity("a")), True, hashes(1, 2, 4), [])
    for chain, found in ((hashes(1, 2, 3, 4), {"a": [2]}), (hashes(3, 1), {}), (hashes(1, 2), {"a": [2]})):
        assert held_of(registry, chain) == found


def test_a_prefix_is_forgotten_with_its_worker() -> None:
    registry, clock = make_registry()
    registry.record_blocks(registry.attach(make_identity("a")), True, hashes(1, 2), [])
    clock.now += LEASE
    registry.attach(make_identity("b"))
    assert held_of(registry, hashes(1, 2)) == {}


changes = st.lists(
    st.tuples(st.sampled_from("ab"), st.booleans(), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), max_size=30
)


@given(changes)
def test_blocks_follow_the_events_and_their_count_never_drifts(
    events: list[tuple[str, bool, set[int], set[int]]],
) -> None:
    registry, clock = make_registry(max_cached_blocks=20)
    leases = {name: registry.attach(make_identity(name)) for name in "ab"}
    expected: dict[str, set[int]] = {"a": set(), "b": set()}
    for name, snapshot, stored, removed in events:
        registry.record_blocks(leases[name], snapshot, hashes(*stored), hashes(*removed))
        expected[name] = ((set() if snapshot else expected[name]) - removed) | stored
    assert {w.identity.worker_id: set(w.cached) for w in registry.workers()} == {
        name: set(hashes(*numbers)) for name, numbers in expected.items()
    }
    assert held_of(registry, hashes(*range(10))) == {
        name: [next(number for number in range(11) if number not in numbers)]
        for name, numbers in expected.items()
        if 0 in numbers
    }
    clock.now += LEASE
    registry.expire()
    lease = registry.attach(make_identity("c"))
    registry.record_blocks(lease, True, hashes(*range(100, 130)), [])
    assert len(registry.workers()[0].cached) == 20


def test_a_moved_block_is_cached_on_its_rank_alone() -> None:
    registry, _ = make_registry()
    lease = registry.attach(make_identity("a", ranks=2))
    for holders in (0b01, 0b11, 0b10):
        registry.record_blocks(lease, False, hashes(1), [], [holders])
        found = held_of(registry, hashes(1))
        assert found == {"a": [holders & 1, holders >> 1]}
    assert len(registry.workers()[0].cached) == 1
    registry.record_blocks(lease, False, [], hashes(1))
    assert held_of(registry, hashes(1)) == {}


def with_host_memory(registry: Registry, worker_id: str, ranks: int = 1, blocks: int = 100) -> Lease:
    """A worker that keeps blocks in host memory, as it has reported."""
    lease = registry.attach(make_identity(worker_id, ranks=ranks))
    load = make_load(host_tier=HostTierStatus(blocks, 0))
    statuses = [RankStatus(load, TransferCounters(), 0)] * ranks
    registry.update(lease, WorkerState.SERVING, load, None, statuses if ranks > 1 else ())
    return lease


def found_of(registry: Registry, *numbers: int) -> dict[str, list[tuple[int, int]]]:
    """For each worker, the leading blocks that each rank has in its pool, and those after them in host memory."""
    holders = registry.holders(hashes(*numbers))
    return {
        worker.identity.worker_id: [*zip(worker.prefixes(holders), worker.hosted(holders), strict=True)]
        for worker in registry.workers()
    }


POOL, HOST = 1, 1 << MAX_RANKS


def test_blocks_in_host_memory_continue_those_of_the_pool() -> None:
    registry, _ = make_registry()
    lease = with_host_memory(registry, "a")
    registry.record_blocks(registry.attach(make_identity("b")), True, hashes(1, 2, 3, 4), [])
    registry.record_blocks(lease, True, hashes(1, 2, 3), [], [POOL, POOL | HOST, HOST])
    assert found_of(registry, 1, 2, 3, 4) == {"a": [(2, 1)], "b": [(4, 0)]}
    # The second is evicted from the pool, the third from host memory.
    registry.record_blocks(lease, False, hashes(2), hashes(3), [HOST])
    assert found_of(registry, 1, 2, 3, 4) == {"a": [(1, 1)], "b": [(4, 0)]}
    assert [(len(each.cached), each.pool_blocks) for each in registry.workers()] == [(2, 1), (4, 4)]
    registry.leave(lease)
    assert found_of(registry, 1, 2, 3, 4) == {"b": [(4, 0)]}


def test_each_rank_has_a_host_memory_of_its_own() -> None:
    registry, _ = make_registry()
    lease = with_host_memory(registry, "a", ranks=2)
    registry.record_blocks(lease, True, hashes(1, 2), [], [0b01, HOST << 1])
    assert found_of(registry, 1, 2) == {"a": [(1, 0), (0, 0)]}
    registry.record_blocks(lease, False, hashes(1), [], [0b01 | HOST << 1])
    assert found_of(registry, 1, 2) == {"a": [(1, 0), (0, 2)]}


def test_a_worker_cannot_claim_more_than_both_memories_hold() -> None:
    registry, _ = make_registry()
    lease = registry.attach(make_identity("a", total_blocks=2))
    registry.update(lease, WorkerState.SERVING, make_load(host_tier=HostTierStatus(3, 0)))
    registry.record_blocks(lease, True, hashes(*range(10)), [], [HOST] * 10)
    assert len(registry.workers()[0].cached) == 5
