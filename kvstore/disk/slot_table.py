"""Records which slot of the file holds which key, and chooses the slot to evict."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.disk.content import Content
from kvstore.held_keys import HeldKeys
from kvstore.keys import Key, base_key, twin_key, whole_key
from kvstore.oldest import Oldest
from kvstore.quotas import NO_QUOTAS, Quotas, Tenant


@dataclass(slots=True)
class _Kept:
    slot: int
    tenant: Tenant
    parent: Key | None
    last_used: int
    readers: int = 0


class SlotTable:
    """Thread-safe. A slot is blank, being written, or holds a key. The least recently used slot is evicted, but never
    while somebody reads it, and never before a later block of its chain: no lookup finds a block without its
    predecessor. A tenant that has reached its quota makes room with its own slots.
    """

    def __init__(self, held: HeldKeys, quotas: Quotas = NO_QUOTAS) -> None:
        # Blocks evicted because their tenant had reached its quota, by tenant.
        self.evicted_by_quota: Counter[Tenant] = Counter()
        self._held = held
        self._quotas = quotas
        self._lock = threading.Lock()
        self._kept: dict[Key, _Kept] = {}
        self._writing: dict[Key, Content] = {}
        # Slots kept or being written, by tenant.
        self._used: Counter[Tenant] = Counter()
        # For each key of base layers, how many kept or written blocks directly follow it.
        self._children: Counter[Key] = Counter()
        self._blank: list[int] = []
        self._oldest: Oldest[Key] = Oldest(self._is_oldest)
        # For each tenant with a quota: its own keys in order of use.
        self._own_oldest: dict[Tenant, Oldest[Key]] = {}
        self._uses = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tenant_blocks(self) -> dict[Tenant, int]:
        """Number of slots of each tenant that has any."""
        with self._lock:
            return dict(self._used)

    def found(self, slot: int, content: Content | None) -> None:
        """Take over a slot as it is in the file at opening."""
        with self._lock:
            if content is None or self._has(content.key) or self._has_its_quota(content.tenant):
                self._blank.append(slot)
            else:
                self._take(content)
                # It counts as used before everything that is used from now on.
                self._keep(content, slot, last_used=0)

    def known(self, keys: Sequence[Key]) -> list[Key]:
        """The leading keys of base layers that have slots. Each is replaced by its key with draft layers if that has a
        slot.
        """
        known: list[Key] = []
        with self._lock:
            for key in keys:
                whole = whole_key(key)
                if whole not in self._kept and key not in self._kept:
                    break
                known.append(whole if whole in self._kept else key)
        return known

    def has(self, key: Key) -> bool:
        """Whether the key has a slot, or is being written to one."""
        with self._lock:
            return self._has(key)

    def tenant_of(self, key: Key) -> Tenant:
        """The key's tenant; empty if it has no slot any more."""
        with self._lock:
            kept = self._kept.get(key)
            return b"" if kept is None else kept.tenant

    def begin_read(self, key: Key) -> int | None:
        """The key's slot, unchanged until `end_read`; None if it has no slot any more."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            kept.readers += 1
            kept.last_used = self._next_use()
            return kept.slot

    def end_read(self, key: Key, damaged: bool = False) -> None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return
            kept.readers -= 1
            if damaged:
                self._drop(key)
            else:
                self._add_evictable(key)

    def begin_write(self, content: Content) -> int | None:
        """A slot to write the block to; None if it has one already, or if there is none for this tenant."""
        with self._lock:
            if self._has(content.key):
                return None
            # Counted first, so that the block's predecessor is not evicted to make room for it.
            self._take(content)
            if not self._make_room(content.tenant):
                self._give_up(content.tenant, content.parent)
                return None
            self._writing[content.key] = content
            return self._blank.pop()

    def end_write(self, key: Key, slot: int, written: bool) -> None:
        with self._lock:
            content = self._writing.pop(key)
            if written:
                self._keep(content, slot, self._next_use())
            else:
                self._blank.append(slot)
                self._give_up(content.tenant, content.parent)

    def _has(self, key: Key) -> bool:
        return key in self._kept or key in self._writing

    def _make_room(self, tenant: Tenant) -> bool:
        """Make room for this tenant's block, which is counted already. Returns whether there is a blank slot now."""
        quota = self._quotas.of(tenant)
        over_quota = quota is not None and self._used[tenant] > quota
        if not over_quota and self._blank:
            return True
        oldest = self._own_oldest.get(tenant) if over_quota else self._oldest
        gives_way = None if oldest is None else oldest.pop()
        if gives_way is None:
            return False
        if over_quota:
            self.evicted_by_quota[tenant] += 1
        self._drop(gives_way)
        return True

    def _has_its_quota(self, tenant: Tenant) -> bool:
        quota = self._quotas.of(tenant)
        return quota is not None and self._used[tenant] >= quota

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _is_oldest(self, last_used: int, key: Key) -> bool:
        kept = self._kept.get(key)
        return kept is not None and kept.last_used == last_used and self._may_give_way(key, kept)

    def _may_give_way(self, key: Key, kept: _Kept) -> bool:
        return not kept.readers and (not self._children[base_key(key)] or twin_key(key) in self._kept)

    def _add_evictable(self, key: Key) -> None:
        kept = self._kept.get(key)
        if kept is None or not self._may_give_way(key, kept):
            return
        self._oldest.add(kept.last_used, key)
        if self._quotas.of(kept.tenant) is not None:
            if kept.tenant not in self._own_oldest:
                self._own_oldest[kept.tenant] = Oldest(self._is_oldest)
            self._own_oldest[kept.tenant].add(kept.last_used, key)

    def _take(self, content: Content) -> None:
        """Count a slot of this tenant, for a block that follows that parent."""
        self._used[content.tenant] += 1
        if content.parent is not None:
            self._children[content.parent] += 1

    def _keep(self, content: Content, slot: int, last_used: int) -> None:
        key = content.key
        self._kept[key] = _Kept(slot, content.tenant, content.parent, last_used)
        self._held.gained(base_key(key))
        self._add_evictable(key)
        self._add_evictable(twin_key(key))

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key)
        self._blank.append(kept.slot)
        self._give_up(kept.tenant, kept.parent)
        self._held.lost(base_key(key))

    def _give_up(self, tenant: Tenant, parent: Key | None) -> None:
        """Undo `_take`."""
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]
            self._own_oldest.pop(tenant, None)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self._add_evictable(parent)
            self._add_evictable(whole_key(parent))
