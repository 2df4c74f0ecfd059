from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks.host_blocks import MOST_USES, Evicted, HostBlocks
from engine.blocks.kv_pool import BlockPool
from engine.moves.host_tier import HostTier
from mesh.blocks import chain_hashes
from transfer.memory import Done


def chain(length: int, seed: int = 0) -> list[Evicted]:
    """The blocks of a prompt, root first."""
    hashes = chain_hashes([seed] * length * 64)
    parents = [b"", *hashes]
    return [Evicted(index, content, parents[index], index, False) for index, content in enumerate(hashes)]


def kept(total: int, *chains: Sequence[Evicted]) -> HostBlocks:
    """Host memory that got these chains one after the other, each from its end, as a pool evicts them."""
    host = HostBlocks(total)
    for each in chains:
        for evicted in reversed(each):
            host.add(evicted)
    return host


def contents(blocks: Sequence[Evicted]) -> list[bytes]:
    return [each.content for each in blocks]


def use(host: HostBlocks, blocks: Sequence[Evicted]) -> None:
    host.pin(contents(blocks))
    host.unpin(contents(blocks))


def test_a_block_that_is_here_gets_no_second_slot() -> None:
    host = HostBlocks(2)
    (block,) = chain(1)
    assert host.add(block) is not None
    assert host.add(block) is None
    assert len(host) == 1


def test_a_chain_is_found_up_to_its_first_gap() -> None:
    blocks = chain(4)
    host = kept(8, [blocks[0], blocks[1], blocks[3]])
    assert host.match_prefix(contents(blocks)) == contents(blocks[:2])


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    first, other = chain(3), chain(2, seed=1)
    host = kept(4, first, other)
    assert host.match_prefix(contents(first)) == contents(first[:2])
    assert host.match_prefix(contents(other)) == contents(other)


def test_of_two_prompts_the_one_that_was_used_stays() -> None:
    used, unused = chain(1, seed=1), chain(1, seed=2)
    host = kept(2, used, unused)
    use(host, used)
    host.add(chain(1, seed=3)[0])
    assert used[0].content in host and unused[0].content not in host


def test_of_two_blocks_the_one_that_costs_less_goes() -> None:
    late = Evicted(0, b"late", b"parent", 500, False)
    early = Evicted(1, b"early", b"", 0, False)
    host = kept(2, [early], [late])
    host.add(Evicted(2, b"new", b"", 0, False))
    assert b"late" in host and b"early" not in host


def test_what_was_popular_goes_after_its_last_use() -> None:
    popular = chain(1, seed=1)
    host = kept(4, popular)
    for _ in range(1000):
        use(host, popular)
    for number in range(4 * MOST_USES):
        host.add(chain(1, seed=2 + number)[0])
    assert popular[0].content not in host


def test_nothing_is_kept_if_every_slot_is_pinned() -> None:
    pinned = chain(2, seed=1)
    host = kept(2, pinned)
    host.pin(contents(pinned))
    assert host.add(chain(1, seed=2)[0]) is None
    host.unpin(contents(pinned))
    assert host.add(chain(1, seed=2)[0]) is not None


def test_changes_are_reported_net() -> None:
    host = kept(1, chain(1, seed=1))
    first, second = chain(1, seed=1)[0].content, chain(1, seed=2)[0].content
    assert host.drain_changes() == ([first], [])
    host.add(chain(1, seed=2)[0])
    host.add(chain(1, seed=1)[0])
    assert host.drain_changes() == ([], [])
    host.add(chain(1, seed=2)[0])
    assert host.drain_changes() == ([second], [first])


class ListedSlots:
    """Slots next to a pool whose blocks hold one value each."""

    completes_later = False

    def __init__(self, pool: list[bytes], count: int) -> None:
        self.count = count
        self._pool = pool
        self._slots = [b""] * count

    def write(self, blocks: Sequence[int], slots: Sequence[int]) -> Done[None]:
        for block, slot in zip(blocks, slots, strict=True):
            self._slots[slot] = self._pool[block]
        return Done(None)

    def read(self, slots: Sequence[int], blocks: Sequence[int]) -> Done[float]:
        for slot, block in zip(slots, blocks, strict=True):
            self._pool[block] = self._slots[slot]
        return Done(1.0)


POOL_BLOCKS, HOST_BLOCKS = 10, 7


class TwoTierMachine(RuleBasedStateMachine):
    """Requests over a small alphabet in a pool over host memory. A block's bytes are the hash of what was computed in
    it, so that each address can be compared with what lies there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = [b""] * POOL_BLOCKS
        self.tier = HostTier(ListedSlots(self.bytes, HOST_BLOCKS), 1)
        self.pool = BlockPool(POOL_BLOCKS, self.tier.keep)
        # For each request: its blocks and their contents; how many of these are there, and what is being read after
        # them.
        self.requests: list[tuple[list[int], list[bytes], int, list[bytes]]] = []
        self.reported: set[bytes] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def begin(self, tokens: list[int]) -> None:
        """Admit a request: it holds what it found in both tiers, and reads the second part later."""
        hashes = chain_hashes([token for token in tokens for _ in range(64)])
        cached = self.pool.match_prefix(hashes)
        hosted = self.tier.blocks.match_prefix(hashes[len(cached) :])
        new = len(hashes) - len(cached)
        if new + self.pool.free_among(cached) > self.pool.free_blocks:
            return
        self.pool.acquire(cached)
        self.tier.blocks.pin(hosted)
        blocks = cached + self.pool.allocate(new)
        for block in blocks[len(cached) :]:
            self.bytes[block] = b"poison"
        self.requests.append((blocks, hashes, len(cached), hosted))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """Read what is to be read, compute the rest, and make both known."""
        index = data.draw(st.integers(0, len(self.requests) - 1))
        blocks, hashes, known, hosted = self.requests[index]
        end = known + len(hosted)
        if hosted:
            self.tier.begin_read(hosted, blocks[known:end]).result()
            self.tier.end_read(hosted, 1.0)
            assert [self.bytes[block] for block in blocks[known:end]] == hashes[known:end]
        for place in range(end, len(hashes)):
            self.bytes[blocks[place]] = hashes[place]
        for place in range(known, len(hashes)):
            self.pool.register(blocks[place], hashes[place], hashes[place - 1] if place else b"", index=place)
        self.requests[index] = (blocks, hashes, len(hashes), [])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a request, or preempt it, perhaps before it has read what it found."""
        blocks, _, _, hosted = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.tier.blocks.unpin(hosted)
        self.pool.release(blocks)

    @rule()
    def report(self) -> None:
        added, removed = self.tier.blocks.drain_changes()
        assert not self.reported & set(added) and self.reported >= set(removed)
        self.reported = (self.reported | set(added)) - set(removed)
        assert len(self.reported) == len(self.tier.blocks) and all(each in self.tier.blocks for each in self.reported)

    @invariant()
    def an_address_has_its_own_content_in_both_tiers(self) -> None:
        for content in {content for _, hashes, _, _ in self.requests for content in hashes} | self.reported:
            for block in self.pool.match_prefix([content]):
                assert self.bytes[block] == content
            for slot in self.tier.blocks.slots(self.tier.blocks.match_prefix([content])):
                assert self.tier._slots._slots[slot] == content  # type: ignore[attr-defined]

    @invariant()
    def no_slot_is_lost_or_used_twice(self) -> None:
        host = self.tier.blocks
        slots = host.slots(host._hosted)
        assert len(set(slots)) == len(slots) <= HOST_BLOCKS
        assert len(slots) + len(host._free) == host._fresh

    @invariant()
    def pins_are_those_of_reads_to_come(self) -> None:
        assert self.tier.blocks.pinned == sum(len(hosted) for _, _, _, hosted in self.requests)
        for _, _, _, hosted in self.requests:
            assert all(content in self.tier.blocks for content in hosted)

    @invariant()
    def references_count_the_holders(self) -> None:
        held = [block for blocks, _, _, _ in self.requests for block in blocks]
        assert list(self.pool.references) == [held.count(block) for block in range(POOL_BLOCKS)]


TestTwoTierMachine = TwoTierMachine.TestCase
TestTwoTierMachine.settings = settings(max_examples=60, stateful_step_count=40)
