from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvstore.directory import BlockDirectory
from kvstore.keys import whole_key
from kvstore.quotas import Quotas


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(length)]


def store(
    directory: BlockDirectory, keys: Sequence[bytes], parent: bytes | None = None, tenant: bytes = b""
) -> list[int]:
    reservation = directory.reserve(parent, keys, tenant)
    assert reservation is not None
    directory.store(reservation.blocks)
    return reservation.blocks


def held(directory: BlockDirectory, keys: Sequence[bytes]) -> int:
    """Blocks of the chain that a lookup finds; used now."""
    blocks = directory.match(keys)
    directory.release(blocks)
    return len(blocks)


def test_a_lookup_finds_the_longest_stored_prefix() -> None:
    directory = BlockDirectory(8)
    keys = chain("a", 6)
    store(directory, keys[:4])
    assert held(directory, keys) == 4
    assert held(directory, keys[:2]) == 2
    assert held(directory, keys[1:]) == 3
    assert held(directory, chain("b", 3)) == 0


def test_reserved_blocks_are_found_only_once_they_are_stored() -> None:
    directory = BlockDirectory(8)
    keys = chain("a", 3)
    reservation = directory.reserve(None, keys)
    assert reservation is not None and reservation.wanted == [0, 1, 2]
    assert held(directory, keys) == 0
    directory.store(reservation.blocks)
    assert held(directory, keys) == 3


def test_blocks_that_are_stored_or_landing_are_not_reserved_again() -> None:
    directory = BlockDirectory(8)
    keys = chain("a", 5)
    store(directory, keys[:1])
    first = directory.reserve(None, keys[:3])
    second = directory.reserve(None, keys)
    assert first is not None and first.wanted == [1, 2]
    assert second is not None and second.wanted == [3, 4]


def test_abandoned_blocks_can_be_reserved_again() -> None:
    directory = BlockDirectory(3)
    keys = chain("a", 3)
    reservation = directory.reserve(None, keys)
    assert reservation is not None
    directory.abandon(reservation.blocks)
    assert len(store(directory, keys)) == 3


def test_blocks_after_an_unknown_parent_are_refused() -> None:
    directory = BlockDirectory(4)
    assert directory.reserve(b"parent", [b"child"]) is None
    store(directory, [b"parent"])
    assert directory.reserve(b"parent", [b"child"]) is not None


def test_the_least_recently_used_chain_makes_room() -> None:
    directory = BlockDirectory(4)
    for name in "ab":
        store(directory, chain(name, 2))
    assert held(directory, chain("a", 2)) == 2
    store(directory, chain("c", 1))
    assert [held(directory, chain(name, 2)) for name in "abc"] == [2, 1, 1]


def test_later_blocks_of_a_chain_are_evicted_first() -> None:
    directory = BlockDirectory(4)
    keys = chain("a", 4)
    store(directory, keys[:2])
    # Stored later, and so used later, than its parents.
    store(directory, keys[2:], parent=keys[1])
    for count in range(3):
        store(directory, chain("b", count + 1), parent=None)
        assert held(directory, keys) == 3 - count


def test_leased_blocks_stay_and_there_may_be_room_for_none() -> None:
    directory = BlockDirectory(2)
    keys = chain("a", 2)
    store(directory, keys)
    leased = directory.match(keys)
    reservation = directory.reserve(None, chain("b", 2))
    assert reservation is not None and not reservation.blocks
    directory.release(leased)
    assert len(store(directory, chain("b", 2))) == 2


def test_an_offer_does_not_evict_the_block_before_it() -> None:
    directory = BlockDirectory(1)
    store(directory, [b"parent"])
    reservation = directory.reserve(b"parent", [b"child"])
    assert reservation is not None and not reservation.blocks
    assert held(directory, [b"parent"]) == 1


def test_changes_are_net_of_what_came_and_went() -> None:
    directory = BlockDirectory(2)
    store(directory, chain("a", 2))
    assert directory.held.drain_changes().stored == chain("a", 2)
    store(directory, chain("b", 2))
    store(directory, chain("c", 1))
    changes = directory.held.drain_changes()
    assert sorted(changes.stored) == [b"b0", b"c0"]
    assert sorted(changes.removed) == [b"a0", b"a1"]
    assert sorted(directory.held.snapshot()) == [b"b0", b"c0"]


def test_a_tenant_at_its_quota_evicts_its_own_oldest_blocks() -> None:
    directory = BlockDirectory(16, quotas=Quotas(each=4))
    store(directory, chain("other", 2), tenant=b"quiet")
    for name in "ab":
        store(directory, chain(name, 2), tenant=b"busy")
    assert held(directory, chain("a", 2)) == 2
    store(directory, chain("c", 1), tenant=b"busy")
    assert [held(directory, chain(name, 2)) for name in ("other", "a", "b", "c")] == [2, 2, 1, 1]
    assert directory.tenant_blocks == {b"quiet": 2, b"busy": 4}
    assert directory.evicted_by_quota == {b"busy": 1}


def test_a_chain_beyond_its_tenants_quota_is_stored_in_part() -> None:
    directory = BlockDirectory(8, quotas=Quotas(each=None, others={b"small": 3, b"none": 0}))
    assert len(store(directory, chain("a", 6), tenant=b"small")) == 3
    # The next block could only take the place of one that it builds on.
    assert store(directory, chain("a", 6)[3:], parent=b"a2", tenant=b"small") == []
    assert store(directory, chain("b", 2), tenant=b"none") == []
    assert len(store(directory, chain("c", 5), tenant=b"any")) == 5


def test_a_tenant_below_its_quota_evicts_the_least_recently_used() -> None:
    directory = BlockDirectory(4, quotas=Quotas(each=3))
    store(directory, chain("a", 3), tenant=b"first")
    store(directory, chain("b", 2), tenant=b"second")
    assert directory.tenant_blocks == {b"first": 2, b"second": 2}
    assert not directory.evicted_by_quota


def test_blocks_count_for_their_first_tenant_until_abandoned() -> None:
    directory = BlockDirectory(8, quotas=Quotas(each=4))
    store(directory, chain("a", 3), tenant=b"first")
    assert store(directory, chain("a", 4), tenant=b"second") != []
    reservation = directory.reserve(None, chain("b", 2), b"second")
    assert reservation is not None
    assert directory.tenant_blocks == {b"first": 3, b"second": 3}
    directory.abandon(reservation.blocks)
    assert directory.tenant_blocks == {b"first": 3, b"second": 1}


KEYS = [bytes([number]) * 24 for number in range(4)]
WHOLE = [whole_key(key) for key in KEYS]


def test_a_lookup_prefers_blocks_with_draft_layers() -> None:
    directory = BlockDirectory(8)
    plain = store(directory, KEYS[:3])
    whole = store(directory, WHOLE[:2])
    assert directory.match(KEYS) == [*whole, plain[2]]
    assert directory.drafted([*whole, plain[2]]) == 2
    assert directory.drafted(plain) == 0
    # The index hears of base layers.
    assert sorted(directory.held.snapshot()) == KEYS[:3]


def test_a_block_stored_with_draft_layers_is_not_wanted_without() -> None:
    directory = BlockDirectory(8)
    coming = directory.reserve(None, WHOLE[:2])
    assert coming is not None
    offered = directory.reserve(None, KEYS[:3])
    assert offered is not None and offered.wanted == [2]
    directory.store(offered.blocks)
    directory.abandon(coming.blocks)
    again = directory.reserve(None, KEYS[:3])
    assert again is not None and again.wanted == [0, 1]


def test_the_twin_without_draft_layers_is_evicted_first() -> None:
    directory = BlockDirectory(4)
    plain = store(directory, KEYS[:2])
    whole = store(directory, WHOLE[:2])
    assert held(directory, KEYS[:2]) == 2
    # Blocks of a chain are evicted from its end on, unless the same block is there in another form.
    others = store(directory, chain("other", 2))
    assert sorted(others) == sorted(plain)
    assert directory.match(KEYS[:2]) == whole
    directory.held.drain_changes()
    assert not {KEYS[0], KEYS[1]} - set(directory.held.snapshot())


class DirectoryMachine(RuleBasedStateMachine):
    """Chains over a small alphabet, so that they share prefixes; every key is the path to it."""

    quotas = Quotas(each=3, others={b"free": None})

    paths = st.text("ab", min_size=1, max_size=6)
    landings = Bundle("landings")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.directory = BlockDirectory(5, quotas=self.quotas)
        self.published: set[bytes] = set()
        self.leased: list[int] = []
        self.reserved: list[int] = []

    @staticmethod
    def keys(path: str) -> list[bytes]:
        return [path[:length].encode().ljust(24, b"-") for length in range(1, len(path) + 1)]

    @rule(target=landings, path=paths, tenant=st.sampled_from([b"", b"busy", b"free"]), drafted=st.booleans())
    def reserve(self, path: str, tenant: bytes, drafted: bool) -> list[int]:
        keys = self.keys(path)
        reservation = self.directory.reserve(None, [whole_key(key) for key in keys] if drafted else keys, tenant)
        assert reservation is not None
        assert not set(reservation.blocks) & (set(self.leased) | set(self.reserved))
        self.reserved += reservation.blocks
        return reservation.blocks

    @rule(blocks=consumes(landings), lands=st.booleans())
    def end_landing(self, blocks: list[int], lands: bool) -> None:
        (self.directory.store if lands else self.directory.abandon)(blocks)
        for block in blocks:
            self.reserved.remove(block)

    @rule(target=leases, path=paths)
    def match(self, path: str) -> object:
        blocks = self.directory.match(self.keys(path))
        self.leased += blocks
        return multiple(blocks)

    @rule(blocks=consumes(leases))
    def release(self, blocks: list[int]) -> None:
        self.directory.release(blocks)
        for block in blocks:
            self.leased.remove(block)

    @rule()
    def publish(self) -> None:
        changes = self.directory.held.drain_changes()
        assert self.published >= set(changes.removed)
        assert not self.published & set(changes.stored)
        self.published = (self.published - set(changes.removed)) | set(changes.stored)
        assert len(self.published) <= self.directory.stored_blocks
        assert all(self.directory.known([key]) for key in self.published)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        assert self.directory.landing_blocks == len(self.reserved)
        assert self.directory.stored_blocks + self.directory.landing_blocks <= self.directory.total_blocks

    @invariant()
    def nobody_has_more_than_its_quota(self) -> None:
        used = self.directory.tenant_blocks
        assert sum(used.values()) == self.directory.stored_blocks + self.directory.landing_blocks
        assert all(blocks <= (self.quotas.of(tenant) or 5) for tenant, blocks in used.items())

    def teardown(self) -> None:
        self.directory.abandon(self.reserved)
        self.directory.release(self.leased)
        # Nothing is held any more: the whole slab can be had again.
        reservation = self.directory.reserve(None, chain("other", 9), b"free")
        assert reservation is not None and len(reservation.blocks) == 5


DirectoryMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestDirectoryInAnyOrder = DirectoryMachine.TestCase
