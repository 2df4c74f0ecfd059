"""The KV-cache center: puts sessions, the slab and the index together."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.config import KvStoreConfig
from kvstore.held_keys import HeldKeys
from kvstore.index import Index, Location
from kvstore.keys import keys_of
from kvstore.offers import OfferAnswer
from kvstore.publisher import Publisher
from kvstore.quotas import Tenant
from kvstore.sessions import RankSession, RankSessions
from kvstore.slab import OpenAgent, Slab
from kvstore.tenant_figures import TenantFigures
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import TransferCounters, WorkerIdentity
from mesh.observe.metrics import (
    KVSTORE_BLOCKS_TOTAL,
    KVSTORE_BLOCKS_USED,
    KVSTORE_DISK_BLOCKS_TOTAL,
    KVSTORE_DISK_BLOCKS_USED,
    KVSTORE_EVICTED_BLOCKS,
)
from mesh.observe.spans import span
from transfer.ticket import SlabHandle


@dataclass(frozen=True, slots=True)
class StoreAttachment:
    """A session, and all else that a rank needs to use it."""

    session: RankSession
    worker_address: bytes
    lease_seconds: float
    slab: SlabHandle | None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Numbers of blocks are 0 before the first worker attaches, since only a worker says how large a block is."""

    total_blocks: int = 0
    used_blocks: int = 0
    block_bytes: int = 0
    # None without a disk tier.
    disk_blocks: int | None = None
    used_disk_blocks: int = 0
    lookups: int = 0
    hits: int = 0
    attached_workers: int = 0
    transfers: TransferCounters = field(default_factory=TransferCounters)


class Center:
    """Called from one event loop; the transfer thread reads the directory through `Slab.lookups`."""

    def __init__(
        self,
        config: KvStoreConfig,
        store_id: str,
        index: Index,
        open_agent: OpenAgent,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._store_id = store_id
        self._index = index
        self._open_agent = open_agent
        self._sessions = RankSessions(clock, config.session_seconds, config.max_sessions, self._end_session)
        self._slab: Slab | None = None
        self._evicted_blocks = 0
        self._figures = TenantFigures([tenant.name for tenant in config.tenants])
        self._publisher = Publisher(index, self._held, config.index.lease_seconds)

    def attach(self, worker: WorkerIdentity, rank: int, session_id: int) -> StoreAttachment:
        """Renew that session, or open a new one (see `RankSessions.attach`).

        Raises InvalidRequest, NamespaceMismatch, Overloaded.
        """
        slab = self._slab or self._make_slab(worker)
        slab.check(worker)
        session = self._sessions.attach(worker, rank, session_id)
        # Both calls ignore a session that is open already, as it is if this renews it.
        slab.lookups.open(session.session_id, session.digest)
        slab.agent.open_session(session.session_id, session.key)
        return StoreAttachment(session, slab.agent.address, self._sessions.lease_seconds, slab.memory.handle)

    def worker_of(self, session_id: int) -> str:
        """The id of the worker that owns the session. Raises UnknownSession."""
        return self._sessions.get(session_id).worker_id

    async def match(self, namespace: KvNamespace, hashes: Sequence[bytes]) -> tuple[Location | None, int]:
        """The store that holds the longest prefix of the chain, and how many of the blocks only its disk holds. Both
        are hints. The second is known only for this store: others do not tell their tiers.
        """
        keys = keys_of(namespace.digest, hashes)
        with span("kvstore.match", blocks=len(hashes)):
            location = await self._index.match(keys)
        if location is None or location.store_id != self._store_id or self._slab is None:
            return location, 0
        return location, location.blocks - self._slab.directory.known(keys[: location.blocks])

    def offer(
        self,
        session_id: int,
        parent_hash: bytes,
        hashes: Sequence[bytes],
        tenant: Tenant = b"",
        with_drafts: bool = True,
    ) -> OfferAnswer:
        """See `Offers.offer`. Raises UnknownSession."""
        session, slab = self._of(session_id)
        with span("kvstore.offer", blocks=len(hashes)):
            return slab.offers.offer(session, parent_hash, hashes, tenant, with_drafts)

    async def confirm(self, session_id: int, transfer_id: bytes) -> int:
        """Wait until all blocks are stored; returns how many there are. Raises UnknownSession, UnknownTransfer,
        OfferFailed.
        """
        session, slab = self._of(session_id)
        with span("kvstore.confirm"):
            return await slab.offers.confirm(session, transfer_id)

    def withdraw(self, session_id: int, transfer_id: bytes) -> None:
        """Raises UnknownSession."""
        session, slab = self._of(session_id)
        slab.offers.withdraw(session, transfer_id)

    def status(self) -> StoreStatus:
        slab = self._slab
        if slab is None:
            return StoreStatus()
        return StoreStatus(
            total_blocks=slab.directory.total_blocks,
            used_blocks=slab.directory.stored_blocks + slab.directory.landing_blocks,
            block_bytes=slab.geometry.block_bytes,
            disk_blocks=slab.disk.total_blocks if slab.disk else None,
            used_disk_blocks=slab.disk.used_blocks if slab.disk else 0,
            lookups=slab.lookups.lookups,
            hits=slab.lookups.hits,
            attached_workers=self._sessions.workers,
            transfers=slab.agent.counters(),
        )

    async def run(self) -> None:
        """Publish to the index, and end sessions whose lease ran out, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publisher.run())
            group.create_task(self._expire_forever())

    def close(self) -> None:
        """End all transfers, and the calls that wait for them."""
        if self._slab is not None:
            self._slab.close()

    def _make_slab(self, worker: WorkerIdentity) -> Slab:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._apply_events)

        self._slab = Slab(worker, self._config, self._store_id, self._open_agent, wake)
        KVSTORE_BLOCKS_TOTAL.set(self._slab.directory.total_blocks)
        return self._slab

    def _apply_events(self) -> None:
        slab = self._slab
        assert slab is not None
        slab.apply_events()
        KVSTORE_BLOCKS_USED.set(slab.directory.stored_blocks)
        if slab.disk is not None:
            KVSTORE_DISK_BLOCKS_TOTAL.set(slab.disk.total_blocks)
            KVSTORE_DISK_BLOCKS_USED.set(slab.disk.used_blocks)
        KVSTORE_EVICTED_BLOCKS.inc(slab.directory.evicted_blocks - self._evicted_blocks)
        self._evicted_blocks = slab.directory.evicted_blocks
        self._publisher.wake()

    def _of(self, session_id: int) -> tuple[RankSession, Slab]:
        session = self._sessions.get(session_id)
        assert self._slab is not None
        return session, self._slab

    def _end_session(self, session: RankSession) -> None:
        assert self._slab is not None
        self._slab.lookups.close(session.session_id)
        self._slab.agent.close_session(session.session_id)

    def _held(self) -> HeldKeys | None:
        return self._slab.directory.held if self._slab else None

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.session_seconds / 10)
            self._sessions.expire()
            if self._slab is not None:
                self._slab.tell(self._figures)
