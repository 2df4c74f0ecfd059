"""Logs which prefill workers have nothing to do because no decode worker can read their KV."""

import asyncio
import logging

from mesh.domain.workers import unreadable_kv
from scheduler.registry import Registry

log = logging.getLogger(__name__)


class UnreadableKv:
    """Warns of such a prefill worker once, after one lease: the workers of a mesh start one after another, and a worker
    that is replaced comes back. If a reader joins and leaves again, it warns again.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # Since when a worker is unreadable, by worker id and incarnation, on the registry's clock.
        self._since: dict[tuple[str, str], float] = {}
        self._told: set[tuple[str, str]] = set()

    async def run(self, period_seconds: float) -> None:
        """Look periodically, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(period_seconds)

    def look(self) -> None:
        identities = [worker.identity for worker in self._registry.workers()]
        unreadable, now = unreadable_kv(identities), self._registry.now
        found = [(each.worker_id, each.incarnation) for each in identities if each.worker_id in unreadable]
        self._since = {worker: self._since.get(worker, now) for worker in found}
        self._told &= self._since.keys()
        for worker, since in self._since.items():
            if worker not in self._told and since + self._registry.lease_seconds <= now:
                self._told.add(worker)
                name, _ = worker
                fields = {"id": name, "why": unreadable[name]}
                log.warning("prefill worker gets no prompt: no decode worker can read its KV", extra={"fields": fields})
