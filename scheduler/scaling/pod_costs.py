"""Keeps the workers' deletion costs in Kubernetes nearly correct, with few writes.

A Deployment that scales in ends the pods with the lowest cost first, by an annotation of each pod. Kubernetes asks not
to change it all the time, so a cost is written again only once it is off by half. This keeps the order of workers that
differ by more than that.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from mesh.errors import EndpointRefused, EndpointUnavailable
from scheduler.scaling.pods import NO_SUCH_POD, Pods

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
# Kubernetes reads it as a 32-bit integer.
MOST = 2**31 - 1
# Costs below a second count as equal.
LEAST_MS = 1000.0
log = logging.getLogger(__name__)


class PodCosts:
    """`costs` gives milliseconds by worker id, which must be the name of the worker's pod."""

    def __init__(self, costs: Callable[[], Mapping[str, float]], pods: Pods) -> None:
        self._costs = costs
        self._pods = pods
        # Costs written by this process. A worker's first cost is always written: its pod may have an earlier
        # scheduler's.
        self._written: dict[str, int] = {}
        # Why the last write failed; empty if it succeeded.
        self._trouble = ""

    async def run(self, period_seconds: float) -> None:
        """Write the costs periodically, until cancelled."""
        while True:
            await self.update()
            await asyncio.sleep(period_seconds)

    async def update(self) -> None:
        """Write the costs that are off. If a write fails, the rest waits for the next time."""
        costs = self._costs()
        self._written = {name: written for name, written in self._written.items() if name in costs}
        try:
            for name, cost in costs.items():
                if name not in self._written or is_off(self._written[name], cost):
                    await self._write(name, min(MOST, round(cost)))
        except EndpointUnavailable as error:
            self._say(error.message)
        else:
            self._say("")

    async def _write(self, name: str, cost: int) -> None:
        try:
            await self._pods.annotate(name, {ANNOTATION: str(cost)})
        except EndpointRefused as error:
            # The worker is not a pod, or its pod has just ended.
            if error.status != NO_SUCH_POD:
                raise
        self._written[name] = cost

    def _say(self, trouble: str) -> None:
        """Log once that something is wrong, and once that it no longer is."""
        if trouble and not self._trouble:
            log.warning("pods are not told what their ends cost", extra={"fields": {"error": trouble}})
        elif self._trouble and not trouble:
            log.info("pods are told what their ends cost again")
        self._trouble = trouble


def is_off(written: int, cost: float) -> bool:
    """Whether a cost in milliseconds is more than twice, or less than half, of what was written."""
    before, now = max(LEAST_MS, written), max(LEAST_MS, min(MOST, cost))
    return now > 2 * before or before > 2 * now
