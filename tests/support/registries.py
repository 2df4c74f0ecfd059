"""A registry with a clock of its own, and the blocks that its workers hold."""

from collections.abc import Sequence
from typing import Any

from mesh.costs import CostModel
from scheduler.registry import Registry, RegistryLimits
from tests.support.scheduling import ManualClock

LEASE = 10.0
SETTLE = 0.25


def make_registry(costs: CostModel | None = None, **limits: Any) -> tuple[Registry, ManualClock]:
    clock = ManualClock()
    return Registry(clock, LEASE, SETTLE, costs or CostModel(), RegistryLimits(**limits)), clock


def held_of(registry: Registry, chain: Sequence[bytes]) -> dict[str, list[int]]:
    """For each worker that has some of the chain, how many leading blocks each of its ranks has."""
    holders = registry.holders(chain)
    held = {worker.identity.worker_id: worker.prefixes(holders) for worker in registry.workers()}
    return {worker_id: each for worker_id, each in held.items() if any(each)}


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]
