"""The prefill workers that the scheduler knows. No other worker is sent a prompt, whatever a submission says."""

import asyncio
from collections.abc import Callable, Mapping

from mesh.domain.targets import WorkerTarget
from mesh.errors import PermissionDenied

# A placement may arrive a moment before the snapshot that lists its prefill worker.
NEWS_SECONDS = 1.0


class RegisteredPrefills:
    """`replace` gives it a scheduler's present registry. While there is no scheduler, the last registry holds.

    A worker that is no longer listed stays known for one lease, because a scheduler that was just started lists none.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # For each scheduler, endpoints by worker id.
        self._listed: dict[str, Mapping[str, str]] = {}
        # Workers that left, each with its endpoint and the time until which it stays known.
        self._left: dict[str, tuple[str, float]] = {}
        self._changed = asyncio.Event()

    def replace(self, endpoints: Mapping[str, str], lease_seconds: float, scheduler: str = "") -> None:
        """Take the endpoints of all prefill workers in that scheduler's registry, by worker id."""
        now, listed = self._clock(), self._listed.get(scheduler, {})
        gone = {name: (endpoint, now + lease_seconds) for name, endpoint in listed.items()}
        self._left = {
            name: left for name, left in {**self._left, **gone}.items() if name not in endpoints and left[1] > now
        }
        self._listed[scheduler] = endpoints
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, target: WorkerTarget) -> None:
        """Raises PermissionDenied unless the target is a registered worker at its endpoint, or becomes one within a
        moment.
        """
        try:
            async with asyncio.timeout(NEWS_SECONDS):
                while not self.knows(target):
                    await self._changed.wait()
        except TimeoutError:
            raise PermissionDenied(f"the scheduler knows no prefill worker of that id at {target.endpoint}") from None

    def knows(self, target: WorkerTarget) -> bool:
        """Whether the target is a registered worker at its endpoint, or was one less than a lease ago."""
        listed = [each[target.worker_id] for each in self._listed.values() if target.worker_id in each]
        if listed:
            return target.endpoint in listed
        endpoint, until = self._left.get(target.worker_id, ("", 0.0))
        return endpoint == target.endpoint and until > self._clock()
