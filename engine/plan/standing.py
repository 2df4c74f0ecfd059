"""Where tenants stand with one another, as plain data for the batcher."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant that is not named has had nothing and holds nothing."""

    # What was computed for each tenant, in prompt tokens, over its weight.
    served: Mapping[str, float]
    # Admitted requests.
    held: Mapping[str, int]

    def of(self, tenant: str) -> tuple[float, int]:
        return self.served.get(tenant, 0.0), self.held.get(tenant, 0)


# Nobody to be fair to: all requests are one tenant's.
ALONE = Standing({}, {})
