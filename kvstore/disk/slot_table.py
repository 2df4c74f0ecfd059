"""Which slot of the file has which key, and which gives way."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.held_keys import HeldKeys
from kvstore.keys import Key, base_key, whole_key
from kvstore.quotas import NO_QUOTAS, Quotas, Tenant


@dataclass(slots=True)
class _Kept:
    slot: int
    tenant: Tenant
    readers: int = 0


class SlotTable:
    """Thread-safe. A slot is blank, being written, or has a key; the least recently used one gives way, unless somebody
    reads it. A tenant that has its quota makes room by its own.
    """

    def __init__(self, held: HeldKeys, quotas: Quotas = NO_QUOTAS) -> None:
        # What gave way because its tenant had its quota, by tenant.
        self.evicted_by_quota: Counter[Tenant] = Counter()
        self._held = held
        self._quotas = quotas
        self._lock = threading.Lock()
        # Least recently used first.
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        # The same order, of each tenant.
        self._own: dict[Tenant, OrderedDict[Key, None]] = {}
        # With its tenant.
        self._writing: dict[Key, Tenant] = {}
        # Kept or being written, by tenant.
        self._used: Counter[Tenant] = Counter()
        self._blank: list[int] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tenant_blocks(self) -> dict[Tenant, int]:
        """Slots of each tenant that has any."""
        with self._lock:
            return dict(self._used)

    def found(self, slot: int, key: Key | None, tenant: Tenant = b"") -> None:
        """A slot as the file has it when it is opened."""
        with self._lock:
            if key is None or key in self._kept or key in self._writing or self._has_its_quota(tenant):
                self._blank.append(slot)
            else:
                self._used[tenant] += 1
                self._keep(key, slot, tenant)
                # It was last used before all that is in use now.
                self._kept.move_to_end(key, last=False)
                self._own[tenant].move_to_end(key, last=False)

    def known(self, keys: Sequence[Key]) -> list[Key]:
        """The leading keys of base layers that have slots; in their place those with draft layers, where these have."""
        known: list[Key] = []
        with self._lock:
            for key in keys:
                whole = whole_key(key)
                if whole not in self._kept and key not in self._kept:
                    break
                known.append(whole if whole in self._kept else key)
        return known

    def has(self, key: Key) -> bool:
        """Whether it has a slot, or is being written to one."""
        with self._lock:
            return key in self._kept or key in self._writing

    def tenant_of(self, key: Key) -> Tenant:
        """Whose it is; nobody's if it has no slot any more."""
        with self._lock:
            kept = self._kept.get(key)
            return b"" if kept is None else kept.tenant

    def begin_read(self, key: Key) -> int | None:
        """Its slot, which stays as it is until `end_read`; None if it has none any more."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            kept.readers += 1
            self._kept.move_to_end(key)
            self._own[kept.tenant].move_to_end(key)
            return kept.slot

    def end_read(self, key: Key, damaged: bool = False) -> None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return
            kept.readers -= 1
            if damaged:
                self._drop(key)

    def begin_write(self, key: Key, tenant: Tenant = b"") -> int | None:
        """A slot to write it to; None if it has one, or if there is none to give to this tenant."""
        with self._lock:
            if key in self._kept or key in self._writing or not self._make_room(tenant):
                return None
            self._writing[key] = tenant
            self._used[tenant] += 1
            return self._blank.pop()

    def end_write(self, key: Key, slot: int, written: bool) -> None:
        with self._lock:
            tenant = self._writing.pop(key)
            if written:
                self._keep(key, slot, tenant)
            else:
                self._blank.append(slot)
                self._gave_up(tenant)

    def _make_room(self, tenant: Tenant) -> bool:
        """Whether there is a blank slot for this tenant now."""
        has_quota = self._has_its_quota(tenant)
        if not has_quota and self._blank:
            return True
        gives_way = self._unread(self._own.get(tenant, ()) if has_quota else self._kept)
        if gives_way is None:
            return False
        if has_quota:
            self.evicted_by_quota[tenant] += 1
        self._drop(gives_way)
        return True

    def _has_its_quota(self, tenant: Tenant) -> bool:
        quota = self._quotas.of(tenant)
        return quota is not None and self._used[tenant] >= quota

    def _unread(self, oldest_first: Iterable[Key]) -> Key | None:
        return next((key for key in oldest_first if not self._kept[key].readers), None)

    def _keep(self, key: Key, slot: int, tenant: Tenant) -> None:
        self._kept[key] = _Kept(slot, tenant)
        self._own.setdefault(tenant, OrderedDict())[key] = None
        self._held.gained(base_key(key))

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key)
        self._blank.append(kept.slot)
        del self._own[kept.tenant][key]
        self._gave_up(kept.tenant)
        self._held.lost(base_key(key))

    def _gave_up(self, tenant: Tenant) -> None:
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]
            self._own.pop(tenant, None)
