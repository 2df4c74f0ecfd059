"""Tells the index what the store holds: each change, and everything again if the index has lost it."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from kvstore.held_keys import HeldKeys
from kvstore.index import Index
from mesh.errors import IndexUnavailable, LeaseConflict
from mesh.observe.metrics import KVSTORE_INDEX_REBUILDS
from mesh.observe.spans import span

log = logging.getLogger(__name__)

RENEWALS_A_LEASE = 3
RETRY_SECONDS = 1.0


class Publisher:
    """Publishes one store's keys. `held` returns None until the first worker has attached."""

    def __init__(self, index: Index, held: Callable[[], HeldKeys | None], lease_seconds: float) -> None:
        self._index = index
        self._held = held
        self._period_seconds = lease_seconds / RENEWALS_A_LEASE
        # How many of this store's blocks the index should have; None if unknown.
        self._published: int | None = 0
        self._changed = asyncio.Event()
        self._failing = False

    def wake(self) -> None:
        """Note that the held keys have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Publish and renew the lease until cancelled. If the index fails, keep trying."""
        while True:
            self._changed.clear()
            try:
                await self._publish()
            except (IndexUnavailable, LeaseConflict) as error:
                self._note_failure(error.message)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._failing = False
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_seconds):
                    await self._changed.wait()

    async def _publish(self) -> None:
        believed = await self._index.renew()
        held = self._held()
        if held is None:
            return
        expected, self._published = self._published, None
        if believed != expected:
            self._published = await self._rebuild(held)
            return
        changes = held.drain_changes()
        await self._index.remove(changes.removed)
        await self._index.add(changes.stored)
        self._published = expected + len(changes.stored) - len(changes.removed)

    async def _rebuild(self, held: HeldKeys) -> int:
        keys = held.snapshot()
        with span("kvstore.index_rebuild", blocks=len(keys)):
            await self._index.clear()
            await self._index.add(keys)
        KVSTORE_INDEX_REBUILDS.inc()
        return len(keys)

    def _note_failure(self, message: str) -> None:
        # Warn only of the first failure: the index may be away for long.
        log.log(logging.DEBUG if self._failing else logging.WARNING, "not publishing to the index: %s", message)
        self._failing = True
