"""What each tenant uses of a store, as metrics."""

from collections import Counter
from collections.abc import Iterable, Mapping

from kvstore.quotas import Tenant
from mesh.domain.shares import tenant_tag
from mesh.observe.metrics import KVSTORE_QUOTA_EVICTED_BLOCKS, KVSTORE_TENANT_BLOCKS

NO_TENANT = "nobody"


class TenantFigures:
    """Tenants that the store's configuration names appear by name, others by their tag in hexadecimal."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {b"": NO_TENANT, **{tenant_tag(name): name for name in names}}
        # For each tier, the tenants that are shown because they have blocks.
        self._shown: dict[str, set[Tenant]] = {}
        # Keyed by tenant and tier.
        self._evicted: Counter[tuple[Tenant, str]] = Counter()

    def set(self, tier: str, used: Mapping[Tenant, int], evicted_by_quota: Mapping[Tenant, int]) -> None:
        for tenant in self._shown.get(tier, set()) - used.keys():
            KVSTORE_TENANT_BLOCKS.remove(self._name(tenant), tier)
        self._shown[tier] = set(used)
        for tenant, blocks in used.items():
            KVSTORE_TENANT_BLOCKS.labels(self._name(tenant), tier).set(blocks)
        for tenant, evicted in list(evicted_by_quota.items()):
            more = evicted - self._evicted[tenant, tier]
            self._evicted[tenant, tier] = evicted
            if more:
                KVSTORE_QUOTA_EVICTED_BLOCKS.labels(self._name(tenant), tier).inc(more)

    def _name(self, tenant: Tenant) -> str:
        return self._names.get(tenant) or tenant.hex()
