"""How many replicas a role should have. Pure: the load comes in, the replicas and a reason go out.

More replicas are wanted at once. Fewer are wanted only after fewer would have done for a while, and not fewer than were
needed at any time in it. Between the two lies a band in which the number stays, so that a load that varies within the
band changes nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from scheduler.config import ScalingConfig

# A load below this share of a replica counts as none: it is the rest of a decaying average.
NOTHING = 1e-3


@dataclass(frozen=True, slots=True)
class Need:
    """A role's load of one kind, and how much of it one replica can do; both in the same unit."""

    amount: float
    per_replica: float
    # The unit, in words.
    what: str

    @property
    def replicas(self) -> float:
        """Replicas that this load would use fully."""
        return self.amount / self.per_replica

    def __str__(self) -> str:
        return f"{self.amount:.4g} {self.what}, {self.per_replica:.4g} a replica"


@dataclass(frozen=True, slots=True)
class WantedReplicas:
    """The decision about one role; each decision is made from the one before."""

    replicas: int
    # The load that decided, in words.
    reason: str = "nothing to do"
    # Since when fewer replicas would do; None if they would not.
    fewer_since: float | None = None
    # The most replicas that were needed since then.
    most_since: int = 0


def decide(before: WantedReplicas, needs: Collection[Need], now: float, config: ScalingConfig) -> WantedReplicas:
    """The decision at `now` (monotonic, in seconds)."""
    binding = max(needs, key=lambda need: need.replicas, default=None)
    load = 0.0 if binding is None else binding.replicas
    reason = "nothing to do" if binding is None or load <= NOTHING else str(binding)
    more = _replicas(load / config.target_use, config)
    if more > before.replicas:
        return WantedReplicas(more, reason)
    fewer = _replicas(load / (config.target_use * (1 - config.slack)), config)
    if fewer >= before.replicas:
        return WantedReplicas(before.replicas, reason)
    since = now if before.fewer_since is None else before.fewer_since
    most = max(fewer, before.most_since)
    if now - since >= config.scale_in_seconds:
        return WantedReplicas(most, reason)
    return WantedReplicas(before.replicas, reason, since, most)


def _replicas(load: float, config: ScalingConfig) -> int:
    return min(config.max_replicas, ceil(max(0.0, load - NOTHING)))
