"""How much of a store each tenant may have. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvstore.config import QuotaConfig, TenantConfig
from mesh.domain.shares import tenant_tag

# A block's tenant, as a tag from its offer (`mesh.domain.shares.tenant_tag`); empty if the offer names no tenant.
Tenant: TypeAlias = bytes


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits in blocks of one tier; None is no limit."""

    each: int | None = None
    # The quotas of tenants that differ from `each`.
    others: Mapping[Tenant, int | None] = field(default_factory=dict)

    def of(self, tenant: Tenant) -> int | None:
        return self.others.get(tenant, self.each)


NO_QUOTAS = Quotas()


def memory_quotas(each: QuotaConfig, tenants: Sequence[TenantConfig], block_bytes: int) -> Quotas:
    named = {tenant_tag(tenant.name): _blocks(tenant.memory_bytes, block_bytes) for tenant in tenants}
    return Quotas(_blocks(each.memory_bytes, block_bytes), named)


def disk_quotas(each: QuotaConfig, tenants: Sequence[TenantConfig], block_bytes: int) -> Quotas:
    named = {tenant_tag(tenant.name): _blocks(tenant.disk_bytes, block_bytes) for tenant in tenants}
    return Quotas(_blocks(each.disk_bytes, block_bytes), named)


def _blocks(size_bytes: int | None, block_bytes: int) -> int | None:
    return None if size_bytes is None else size_bytes // block_bytes
