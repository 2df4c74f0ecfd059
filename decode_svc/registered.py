"""The prefill workers that the scheduler knows: nobody else is sent a prompt, whatever a submission says."""

import asyncio
from collections.abc import Callable, Mapping

from mesh.domain.targets import WorkerTarget
from mesh.errors import PermissionDenied

# A placement may arrive a moment before the snapshot that shows its prefill worker.
NEWS_SECONDS = 1.0


class RegisteredPrefills:
    """`replace` tells it a scheduler's registry as it is now. Without a scheduler the last one holds.

    A worker that is no longer listed stays known for one lease: a scheduler that was just started lists nobody.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By scheduler: endpoints by worker id.
        self._listed: dict[str, Mapping[str, str]] = {}
        # Those that left, each with the time until which it is known.
        self._left: dict[str, tuple[str, float]] = {}
        self._changed = asyncio.Event()

    def replace(self, endpoints: Mapping[str, str], lease_seconds: float, scheduler: str = "") -> None:
        """The endpoints of all prefill workers of that scheduler's registry, by worker id."""
        now, listed = self._clock(), self._listed.get(scheduler, {})
        gone = {name: (endpoint, now + lease_seconds) for name, endpoint in listed.items()}
        self._left = {
            name: left for name, left in {**self._left, **gone}.items() if name not in endpoints and left[1] > now
        }
        self._listed[scheduler] = endpoints
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, target: WorkerTarget) -> None:
        """Raises PermissionDenied if that is no registered worker at its endpoint, nor becomes one in a moment."""
        try:
            async with asyncio.timeout(NEWS_SECONDS):
                while not self.knows(target):
                    await self._changed.wait()
        except TimeoutError:
            raise PermissionDenied(f"the scheduler knows no prefill worker of that id at {target.endpoint}") from None

    def knows(self, target: WorkerTarget) -> bool:
        """Whether that is a registered worker at its endpoint, or was one less than a lease ago."""
        listed = [each[target.worker_id] for each in self._listed.values() if target.worker_id in each]
        if listed:
            return target.endpoint in listed
        endpoint, until = self._left.get(target.worker_id, ("", 0.0))
        return endpoint == target.endpoint and until > self._clock()
