"""Records which block of the slab holds which key. The bytes themselves belong to the slab."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.held_keys import HeldKeys
from kvstore.keys import Key, base_key, is_whole, twin_key, whole_key
from kvstore.oldest import Oldest
from kvstore.quotas import NO_QUOTAS, Quotas, Tenant


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks reserved for those offered keys that were neither stored nor landing, in chain order."""

    # Positions of these keys in the offer.
    wanted: list[int]
    blocks: list[int]


class BlockDirectory:
    """Keys, leases and eviction of `total_blocks` blocks. Thread-safe: lookups come from the transfer thread.

    A block is blank, landing (reserved for bytes on their way) or stored. Lookups find only stored blocks. The least
    recently used stored block is evicted first, but never while it is leased, and never before a later block of its
    chain: no lookup finds a block without its predecessor. A tenant that has reached its quota makes room for new
    blocks with its own.

    Lookups and chains name base layers. A block that also has draft layers is preferred; the block without them is then
    evicted sooner or later.
    """

    def __init__(self, total_blocks: int, held: HeldKeys | None = None, quotas: Quotas = NO_QUOTAS) -> None:
        """`held` is told which keys are stored and evicted."""
        self.held = HeldKeys() if held is None else held
        self.total_blocks = total_blocks
        self.evicted_blocks = 0
        # Blocks evicted because their tenant had reached its quota, by tenant.
        self.evicted_by_quota: Counter[Tenant] = Counter()
        self._quotas = quotas
        self._lock = threading.Lock()
        self._keys: list[Key | None] = [None] * total_blocks
        self._parents: list[Key | None] = [None] * total_blocks
        # The tenant that first offered each block; blank blocks belong to no tenant.
        self._tenants: list[Tenant] = [b""] * total_blocks
        # Blocks stored or landing, by tenant.
        self._used: Counter[Tenant] = Counter()
        self._leases = [0] * total_blocks
        self._last_used = [0] * total_blocks
        self._stored: dict[Key, int] = {}
        # How many stored blocks have draft layers. While there are none, lookups need no second search.
        self._stored_whole = 0
        self._landing: dict[Key, int] = {}
        # For each key of base layers, how many stored or landing blocks directly follow it.
        self._children: Counter[Key] = Counter()
        # A stack, with block 0 on top.
        self._blank = list(range(total_blocks - 1, -1, -1))
        self._oldest: Oldest[int] = Oldest(self._is_oldest)
        # For each tenant with a quota: its own blocks in order of use.
        self._own_oldest: dict[Tenant, Oldest[int]] = {}
        self._uses = 0

    @property
    def stored_blocks(self) -> int:
        return len(self._stored)

    @property
    def landing_blocks(self) -> int:
        return len(self._landing)

    @property
    def tenant_blocks(self) -> dict[Tenant, int]:
        """Number of blocks of each tenant that has any."""
        with self._lock:
            return dict(self._used)

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Blocks of the longest stored prefix of a chain. Each is leased until `release`."""
        blocks, leases = [], self._leases
        with self._lock:
            find = self._find if self._stored_whole else self._stored.get
            for key in keys:
                block = find(key)
                if block is None:
                    break
                leases[block] += 1
                blocks.append(block)
        return blocks

    def drafted(self, blocks: Sequence[int]) -> int:
        """How many of these leased or reserved blocks, counted from the first, have draft layers."""
        held = (self._keys[block] for block in blocks)
        return next((number for number, key in enumerate(held) if key is None or not is_whole(key)), len(blocks))

    def known(self, keys: Sequence[Key]) -> int:
        """How many leading keys of a chain are stored now."""
        with self._lock:
            return next((number for number, key in enumerate(keys) if self._find(key) is None), len(keys))

    def release(self, blocks: Sequence[int], used: bool = True) -> None:
        """End one lease of each block. `used`: the blocks were used now."""
        leases = self._leases
        with self._lock:
            self._uses += used
            for block in blocks:
                assert leases[block] > 0
                leases[block] -= 1
                if used:
                    self._last_used[block] = self._uses
                # Only the last block of a chain may be evicted.
                if not leases[block]:
                    self._add_evictable(block)

    def lease(self, key: Key) -> int | None:
        """The block of that key, leased until `release`; None if it is not stored."""
        with self._lock:
            block = self._stored.get(key)
            if block is not None:
                self._leases[block] += 1
            return block

    def keys_of(self, blocks: Sequence[int]) -> list[Key]:
        """The keys of leased blocks."""
        return [key for block in blocks if (key := self._keys[block]) is not None]

    def tenant_of(self, block: int) -> Tenant:
        """The tenant of a leased block."""
        return self._tenants[block]

    def parent_of(self, block: int) -> Key | None:
        """The key before a leased block in its chain; None at the root."""
        return self._parents[block]

    def reserve(self, parent: Key | None, keys: Sequence[Key], tenant: Tenant = b"") -> Reservation | None:
        """Reserve blocks for the keys of a chain that are neither stored nor landing, as far as there is room for this
        tenant.

        `parent` is the key before the first; None at the root. Returns None if the parent is neither stored nor
        landing: no lookup would find these blocks. A key without draft layers counts as present if the block is present
        with them.
        """
        with self._lock:
            if parent is not None and not self._is_coming(base_key(parent)):
                return None
            reservation = Reservation([], [])
            for index, key in enumerate(keys):
                if not self._is_coming(key):
                    block = self._reserve(parent, key, tenant)
                    if block is None:
                        break
                    reservation.wanted.append(index)
                    reservation.blocks.append(block)
                parent = key
            return reservation

    def store(self, blocks: Sequence[int], leased: bool = False) -> list[Key]:
        """The bytes of these reserved blocks are in place: lookups find them from now on. Returns their keys.

        `leased`: lease each block until `release`, for a caller that waited for it.
        """
        keys = []
        with self._lock:
            self._uses += 1
            for block in blocks:
                key = self._keys[block]
                assert key is not None and self._landing.get(key) == block
                self._stored[key] = self._landing.pop(key)
                self._stored_whole += is_whole(key)
                self._last_used[block] = self._uses
                self._leases[block] += leased
                self.held.gained(base_key(key))
                self._add_evictable(block)
                self._add_twin(key)
                keys.append(key)
        return keys

    def abandon(self, blocks: Sequence[int]) -> None:
        """The bytes of these reserved blocks will not come."""
        with self._lock:
            for block in blocks:
                key = self._keys[block]
                assert key is not None and self._landing.get(key) == block
                del self._landing[key]
                self._clear(block)
                self._blank.append(block)

    def _find(self, key: Key) -> int | None:
        block = self._stored.get(whole_key(key)) if self._stored_whole else None
        return self._stored.get(key) if block is None else block

    def _is_coming(self, key: Key) -> bool:
        whole = whole_key(key)
        return any(each in self._stored or each in self._landing for each in (key, whole))

    def _reserve(self, parent: Key | None, key: Key, tenant: Tenant) -> int | None:
        # Counted first, so that the parent is not evicted to make room for its own child.
        parent = None if parent is None else base_key(parent)
        if parent is not None:
            self._children[parent] += 1
        block = self._room(tenant)
        if block is None:
            self._forget_child(parent)
            return None
        self._keys[block], self._parents[block], self._tenants[block] = key, parent, tenant
        self._used[tenant] += 1
        self._landing[key] = block
        return block

    def _room(self, tenant: Tenant) -> int | None:
        """A blank block, or an evicted one; None if there is none for this tenant."""
        quota = self._quotas.of(tenant)
        if quota is None or self._used[tenant] < quota:
            return self._blank.pop() if self._blank else self._evict(self._oldest.pop())
        own = self._own_oldest.get(tenant)
        block = None if own is None else self._evict(own.pop())
        if block is not None:
            self.evicted_by_quota[tenant] += 1
        return block

    def _evict(self, block: int | None) -> int | None:
        """Forget the content of this evictable block; returns the block."""
        if block is None:
            return None
        key = self._keys[block]
        assert key is not None
        del self._stored[key]
        self._stored_whole -= is_whole(key)
        self.held.lost(base_key(key))
        self._clear(block)
        self.evicted_blocks += 1
        return block

    def _is_oldest(self, last_used: int, block: int) -> bool:
        return last_used == self._last_used[block] and self._is_evictable(block)

    def _is_evictable(self, block: int) -> bool:
        key = self._keys[block]
        if key is None or self._leases[block] or key not in self._stored:
            return False
        if not self._stored_whole:
            return key not in self._children
        return base_key(key) not in self._children or twin_key(key) in self._stored

    def _add_twin(self, key: Key) -> None:
        """The block is now stored both with and without draft layers. The other version may be evicted, even if blocks
        follow it.
        """
        block = self._stored.get(twin_key(key))
        if block is not None:
            self._add_evictable(block)

    def _add_evictable(self, block: int) -> None:
        if not self._is_evictable(block):
            return
        self._oldest.add(self._last_used[block], block)
        tenant = self._tenants[block]
        if self._quotas.of(tenant) is None:
            return
        if tenant not in self._own_oldest:
            self._own_oldest[tenant] = Oldest(self._is_oldest)
        self._own_oldest[tenant].add(self._last_used[block], block)

    def _clear(self, block: int) -> None:
        parent, tenant = self._parents[block], self._tenants[block]
        self._keys[block] = self._parents[block] = None
        self._tenants[block] = b""
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]
            self._own_oldest.pop(tenant, None)
        self._forget_child(parent)

    def _forget_child(self, parent: Key | None) -> None:
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            for key in (parent, whole_key(parent)):
                block = self._stored.get(key)
                if block is not None:
                    self._add_evictable(block)
