"""Which tenant a request belongs to, and how much of a full mesh that tenant may use. Pure."""

import hashlib
from collections import Counter

import msgspec

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


class Share(msgspec.Struct, frozen=True):
    """A request's claim to resources that tenants share. Requests without a tenant count as those of one tenant."""

    tenant: str = ""
    # The tenant's weight relative to those of other tenants.
    weight: float = 1.0
    # Requests of one tenant run in the order of this number, lowest first.
    priority: int = 0


# The share of all requests if there are no tenants.
ONE_TENANT = Share()

TENANT_TAG_BYTES = 16


def tenant_tag(tenant: str) -> bytes:
    """A tag that stands for a tenant's name in counts; empty for no tenant. Whoever guesses the name can check the
    guess.
    """
    if not tenant:
        return b""
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_TAG_BYTES, person=b"deepmesh-tenant").digest()


class Census:
    """Counts the requests of each tenant in one place. Its owner adds and removes each request once."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._total = 0
        self._weights: dict[str, float] = {}

    def add(self, share: Share) -> None:
        self._total += 1
        self._requests[share.tenant] += 1
        self._weights[share.tenant] = share.weight

    def remove(self, share: Share) -> None:
        self._total -= 1
        self._requests[share.tenant] -= 1
        if not self._requests[share.tenant]:
            del self._requests[share.tenant], self._weights[share.tenant]

    def ahead(self, share: Share) -> float:
        """The fraction of waiting requests that is served before one more request of this tenant, from 0 to 1.

        It is 1 for a tenant that has its part of the requests or more, and near 0 for one that has few. So a limit on
        the requests ahead admits a tenant that has less than its part, and at most twice as many requests wait as the
        limit says.
        """
        before = self._requests[share.tenant]
        own, others = before + 1, self._total - before
        weights = sum(self._weights.values()) - self._weights.get(share.tenant, 0.0) + share.weight
        return min(1.0, own / (own + others) * weights / share.weight)
