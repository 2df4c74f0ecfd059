"""What each tenant has had of this engine and what it holds, from which a fair order is made.

Virtual token counters, after Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): every token that is
computed counts for its tenant, over the tenant's weight, and the tenant that was served least goes first. A tenant that
comes back begins with as much as the least served of those present: it saves nothing up while it is away.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mesh.domain.shares import Share


@dataclass(frozen=True, slots=True)
class TenantStanding:
    """A tenant that is not named has had nothing and holds nothing."""

    # What was computed for each tenant, in prompt tokens, over its weight.
    served: Mapping[str, float]
    # Admitted requests.
    held: Mapping[str, int]

    def of(self, tenant: str) -> tuple[float, int]:
        return self.served.get(tenant, 0.0), self.held.get(tenant, 0)


# All requests are one tenant's, so there is nothing to divide.
ALONE = TenantStanding({}, {})


# How many tenants are remembered while they have no request here.
MAX_ABSENT = 1024


class Tenants:
    """A request is entered once and leaves once; between the two it is admitted, and may be preempted."""

    def __init__(self) -> None:
        self._shares: dict[int, Share] = {}
        self._admitted: set[int] = set()
        self._requests: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._served: dict[str, float] = {}
        # What the least served of the tenants with requests had when this was last computed.
        self._floor = 0.0

    @property
    def standing(self) -> TenantStanding:
        return TenantStanding(self._served, self._held) if len(self._requests) > 1 else ALONE

    @property
    def several(self) -> bool:
        """Whether it matters whose work is done: more than one tenant is known."""
        return len(self._served) > 1

    def enter(self, key: int, share: Share) -> None:
        """The tenant has a request here. A preempted request that waits again was entered before."""
        if key in self._shares:
            return
        tenant = share.tenant
        if tenant not in self._requests:
            self._raise_floor()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        self._shares[key] = share
        self._requests[tenant] += 1

    def leave(self, key: int) -> None:
        """The request has ended. One that ended before it was queued never entered."""
        if key not in self._shares:
            return
        self.give_back(key)
        tenant = self._shares[key].tenant
        self._raise_floor()
        del self._shares[key]
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
        if len(self._served) > len(self._requests):
            self._forget_absent()

    def admit(self, key: int) -> None:
        """The request holds a place in the batch."""
        self._admitted.add(key)
        self._held[self._shares[key].tenant] += 1

    def give_back(self, key: int) -> None:
        """The request no longer holds a place, if it did."""
        if key in self._admitted:
            self._admitted.remove(key)
            tenant = self._shares[key].tenant
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]

    def serve(self, computed: Iterable[tuple[int, int]]) -> None:
        """Count what was computed: pairs of a request's key and prompt tokens. One tenant alone is not counted."""
        if self.several:
            for key, tokens in computed:
                share = self._shares[key]
                self._served[share.tenant] += tokens / share.weight

    def _raise_floor(self) -> None:
        self._floor = max(self._floor, min((self._served[tenant] for tenant in self._requests), default=0.0))

    def _forget_absent(self) -> None:
        """Forget absent tenants that would come back with no more than the least served has, and all but MAX_ABSENT."""
        absent = sorted((served, tenant) for tenant, served in self._served.items() if tenant not in self._requests)
        for index, (served, tenant) in enumerate(absent):
            if served <= self._floor or len(absent) - index > MAX_ABSENT:
                del self._served[tenant]
