import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks.kv_pool import BlockChanges, BlockPool
from mesh.blocks import chain_hashes


def content(number: int) -> bytes:
    return number.to_bytes(16, "little")


def cached_pool(total_blocks: int, chain: list[int]) -> BlockPool:
    """A pool in which a released request left these contents, root first."""
    pool = BlockPool(total_blocks)
    blocks = pool.allocate(len(chain))
    for block, number in zip(blocks, chain, strict=True):
        pool.register(block, content(number))
    pool.release(blocks)
    pool.drain_changes()
    return pool


def test_a_full_pool_refuses_new_blocks() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    assert not pool.can_allocate(1)
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_released_blocks_can_be_allocated_again() -> None:
    pool = BlockPool(3)
    pool.release(pool.allocate(3))
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_prefix_matches_as_far_as_it_is_known() -> None:
    pool = cached_pool(8, [1, 2, 3])
    assert len(pool.match_prefix([content(1), content(2), content(9), content(3)])) == 2


def test_a_block_without_its_parent_does_not_match() -> None:
    pool = cached_pool(8, [1, 2])
    assert pool.match_prefix([content(2)]) != []
    assert pool.match_prefix([content(7), content(2)]) == []


def test_acquired_cached_blocks_are_not_evicted() -> None:
    pool = cached_pool(4, [1, 2])
    held = pool.match_prefix([content(1), content(2)])
    assert pool.free_among(held) == 2
    pool.acquire(held)
    assert pool.free_blocks == 2
    assert not set(pool.allocate(2)) & set(held)
    assert not pool.can_allocate(1)


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    pool = cached_pool(4, [1, 2])
    pool.allocate(2)
    assert pool.drain_changes() == BlockChanges([], [])
    assert len(pool.match_prefix([content(1), content(2)])) == 2


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = cached_pool(3, [1, 2, 3])
    pool.allocate(1)
    assert pool.drain_changes().removed == [content(3)]
    pool.allocate(1)
    assert pool.drain_changes().removed == [content(2)]


def test_content_used_again_is_evicted_last() -> None:
    pool = cached_pool(4, [1])
    blocks = pool.allocate(1)
    pool.register(blocks[0], content(2))
    pool.release(blocks)
    first = pool.match_prefix([content(1)])
    pool.acquire(first)
    pool.release(first)
    pool.drain_changes()
    pool.allocate(3)
    assert pool.drain_changes() == BlockChanges([], [content(2)])


def test_a_second_block_of_equal_content_is_never_found() -> None:
    pool = cached_pool(4, [1])
    twin = pool.allocate(1)
    pool.register(twin[0], content(1))
    assert pool.match_prefix([content(1)]) != twin
    pool.release(twin)
    assert pool.drain_changes() == BlockChanges([], [])
    assert pool.allocate(1) == twin


def test_content_that_came_and_went_between_reports_is_not_reported() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.register(blocks[0], content(1))
    pool.release(blocks)
    pool.allocate(1)
    assert pool.drain_changes() == BlockChanges([], [])


def test_content_that_went_and_came_back_is_not_reported() -> None:
    pool = cached_pool(1, [1])
    blocks = pool.allocate(1)
    pool.register(blocks[0], content(1))
    assert pool.drain_changes() == BlockChanges([], [])


def test_a_stored_block_is_reported_with_the_one_before_it() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.register(blocks[0], content(1))
    pool.register(blocks[1], content(2), parent=content(1))
    assert pool.drain_changes() == BlockChanges([content(1), content(2)], [], [b"", content(1)])


def test_a_chains_tenant_is_reported_with_its_first_block() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.register(blocks[0], content(1), tenant="acme")
    pool.register(blocks[1], content(2), parent=content(1), tenant="acme")
    pool.register(blocks[2], content(3))
    assert pool.drain_changes().tenants == {content(1): "acme"}
    # A block that was evicted before it was reported has no tenant to report.
    pool.release(blocks)
    (again,) = pool.allocate(1)
    pool.register(again, content(4), tenant="acme")
    pool.release([again])
    pool.allocate(3)
    assert pool.drain_changes().tenants == {}


class PoolMachine(RuleBasedStateMachine):
    """Requests over a small alphabet, so that they share prefixes. The reference state is what each request holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        # For each request its blocks, and the hashes of its leading registered blocks.
        self.requests: list[tuple[list[int], list[bytes]]] = []
        self.reported: set[bytes] = set()

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def begin(self, chain: list[int]) -> None:
        hashes = chain_hashes([token for token in chain for _ in range(64)])
        cached = self.pool.match_prefix(hashes)
        new = len(hashes) - len(cached)
        if new + self.pool.free_among(cached) > self.pool.free_blocks:
            return
        self.pool.acquire(cached)
        blocks = cached + self.pool.allocate(new)
        for block, filled in zip(blocks[len(cached) :], hashes[len(cached) :], strict=True):
            self.pool.register(block, filled)
        self.requests.append((blocks, hashes))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        blocks, _ = data.draw(st.sampled_from(self.requests))
        if self.pool.can_allocate(1):
            blocks += self.pool.allocate(1)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        blocks, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pool.release(blocks)

    @rule()
    def report(self) -> None:
        changes = self.pool.drain_changes()
        assert not self.reported & set(changes.stored)
        assert self.reported >= set(changes.removed)
        self.reported = (self.reported | set(changes.stored)) - set(changes.removed)
        for filled in self.reported:
            assert self.pool.match_prefix([filled])

    @invariant()
    def references_count_the_holders(self) -> None:
        held = [block for blocks, _ in self.requests for block in blocks]
        assert list(self.pool.references) == [held.count(block) for block in range(12)]
        assert self.pool.free_blocks == 12 - len(set(held))

    @invariant()
    def held_content_stays_addressable(self) -> None:
        for _, hashes in self.requests:
            assert len(self.pool.match_prefix(hashes)) == len(hashes)

    @invariant()
    def a_block_has_one_writer(self) -> None:
        for blocks, hashes in self.requests:
            for block in blocks[len(hashes) :]:
                assert self.pool.references[block] == 1


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
