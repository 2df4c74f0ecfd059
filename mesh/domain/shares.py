"""Whose a request is, and how much of a full mesh its tenant may have. Pure."""

import hashlib
from collections import Counter

import msgspec

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


class Share(msgspec.Struct, frozen=True):
    """A request's claim to what tenants share. Requests without tenants are all one tenant's."""

    tenant: str = ""
    # The tenant's part, relative to those of others.
    weight: float = 1.0
    # Among its tenant's requests the lowest goes first.
    priority: int = 0


# Where there are no tenants.
ONE_TENANT = Share()

TENANT_TAG_BYTES = 16


def tenant_tag(tenant: str) -> bytes:
    """Names a tenant to whoever only counts what is its; empty for none. Whoever guesses the name can tell."""
    if not tenant:
        return b""
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_TAG_BYTES, person=b"deepmesh-tenant").digest()


class Census:
    """The requests of each tenant that some place has. Its owner adds and removes each of them once."""

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
        """Which part of those who wait is served before one more request of this tenant, from 0 to 1.

        It is 1 for a tenant with its part of the requests or more, and next to nothing for one with few. So a limit on
        those ahead lets in a tenant that has less than its part, and no more than twice as many wait as the limit says.
        """
        before = self._requests[share.tenant]
        own, others = before + 1, self._total - before
        weights = sum(self._weights.values()) - self._weights.get(share.tenant, 0.0) + share.weight
        return min(1.0, own / (own + others) * weights / share.weight)
