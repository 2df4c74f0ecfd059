"""A registry with a clock of its own, and the blocks that its workers hold."""

from collections.abc import Sequence
from typing import Any

from mesh.costs import CostModel
from scheduler.config import LeaseConfig
from scheduler.registry import Registry
from tests.support.scheduling import ManualClock

LEASE = 10.0
SETTLE = 0.25


def make_registry(costs: CostModel | None = None, **lease: Any) -> tuple[Registry, ManualClock]:
    """A registry that knows from the start that no other worker lives, unless `gather_seconds` is given."""
    clock = ManualClock()
    config = LeaseConfig(**{"seconds": LEASE, "settle_seconds": SETTLE, "gather_seconds": 0.0, **lease})
    return Registry(clock, config, costs or CostModel()), clock


def held_of(registry: Registry, chain: Sequence[bytes]) -> dict[str, list[int]]:
    """For each worker that has some of the chain, how many leading blocks each of its ranks has."""
    holders = registry.holders(chain)
    held = {worker.identity.worker_id: worker.prefixes(holders) for worker in registry.workers()}
    return {worker_id: each for worker_id, each in held.items() if any(each)}


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]
