"""The store's memory: blocks of one geometry, the directory of what they hold, and the agent that moves their bytes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import msgspec

from kvstore.config import KvStoreConfig
from kvstore.directory import BlockDirectory
from kvstore.disk.tier import DiskTier
from kvstore.lookups import Lookups
from kvstore.memory_size import store_size
from kvstore.offers import OfferLandings, Offers
from kvstore.quotas import disk_quotas, memory_quotas
from kvstore.store_memory import StoreMemory
from kvstore.tenant_figures import TenantFigures
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import TransferCounters, WorkerIdentity
from mesh.errors import InvalidRequest, NamespaceMismatch
from mesh.memory.machine_memory import machine_memory
from transfer.events import Event, Landed, LandingFailed
from transfer.fetch.lookup_server import LookupHandler
from transfer.kept_macs import KeptMacs

MAX_LAYERS = 1024
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Geometry:
    """A block is stored as pieces of equal size: one for each base layer, and room for one for each draft layer."""

    base_layers: int
    draft_layers: int
    piece_bytes: int

    @property
    def layers(self) -> int:
        return self.base_layers + self.draft_layers

    @property
    def block_bytes(self) -> int:
        return self.layers * self.piece_bytes


class StoreAgent(OfferLandings, Protocol):
    """The part of `transfer.agent.TransferAgent` that a store needs."""

    @property
    def address(self) -> bytes: ...

    def events(self) -> Sequence[Event]: ...

    @property
    def macs(self) -> KeptMacs: ...

    def blocks_read(self, session_id: int, sequence: int, ready: int, over: bool) -> None: ...

    def open_session(self, session_id: int, session_key: bytes) -> None: ...

    def close_session(self, session_id: int) -> None: ...

    def counters(self) -> TransferCounters: ...

    def close(self) -> None: ...


# Opens an agent. Arguments: the store's memory, the first worker's namespace with the store's draft layers, the handler
# of lookups, and a function to call (from any thread) when there are events.
OpenAgent: TypeAlias = Callable[[StoreMemory, KvNamespace, LookupHandler, Callable[[], None]], StoreAgent]


def geometry_of(worker: WorkerIdentity) -> Geometry:
    """Raises InvalidRequest if the worker does not say how large its blocks are, or could not send one."""
    layers = worker.kv_namespace.layers
    if not worker.block_bytes:
        raise InvalidRequest("the worker does not say how large a block is", field="worker.block_bytes")
    if not 0 < layers <= MAX_LAYERS or worker.block_bytes % layers:
        raise InvalidRequest(
            f"a block of {worker.block_bytes} bytes cannot be {layers} equal layers", field="worker.block_bytes"
        )
    draft_layers = worker.kv_namespace.draft_layers
    geometry = Geometry(layers - draft_layers, draft_layers, worker.block_bytes // layers)
    if worker.slot_bytes is not None and worker.slot_bytes < geometry.piece_bytes:
        raise InvalidRequest(
            f"slots of {worker.slot_bytes} bytes do not hold one block of one layer, which has {geometry.piece_bytes}",
            field="worker.slot_bytes",
        )
    return geometry


def _total_blocks(config: KvStoreConfig, block_bytes: int) -> int:
    size = store_size(config, block_bytes, machine_memory())
    total_blocks = size.memory_bytes // block_bytes
    if not total_blocks:
        raise NamespaceMismatch(
            f"one block is {block_bytes} bytes and the store has {size.memory_bytes}: raise memory_bytes"
        )
    fields = {"blocks": total_blocks, "memory_bytes": size.memory_bytes, "reason": size.reason}
    log.info("memory for blocks", extra={"fields": fields})
    return total_blocks


def _memory(geometry: Geometry, total_blocks: int) -> StoreMemory:
    try:
        return StoreMemory(geometry.layers, total_blocks, geometry.piece_bytes)
    except OSError as error:
        size_bytes, why = total_blocks * geometry.block_bytes, (error.strerror or "").lower()
        raise NamespaceMismatch(
            f"the machine has no {size_bytes} bytes for blocks ({why}): lower memory_bytes or memory_share"
        ) from error


class Slab:
    """Made for the first worker. Others share it if their base layers have the same geometry, whatever their
    namespace.
    """

    def __init__(
        self,
        worker: WorkerIdentity,
        config: KvStoreConfig,
        store_id: str,
        open_agent: OpenAgent,
        wake: Callable[[], None],
    ) -> None:
        """Raises InvalidRequest, and NamespaceMismatch if not even one block fits or there is too little memory."""
        self.geometry = geometry_of(worker)
        if config.draft_layers is not None:
            self.geometry = replace(self.geometry, draft_layers=config.draft_layers)
        block_bytes = self.geometry.block_bytes
        total_blocks = _total_blocks(config, block_bytes)
        self.memory = _memory(self.geometry, total_blocks)
        quotas = memory_quotas(config.quota, config.tenants, block_bytes)
        self.directory = BlockDirectory(total_blocks, quotas=quotas)
        self.disk: DiskTier | None = None
        if config.disk.path is not None:
            quotas = disk_quotas(config.quota, config.tenants, block_bytes)
            self.disk = DiskTier(config.disk, store_id, self.directory, self.memory, wake, quotas)
        # The agent exists before anything is read.
        self.lookups = Lookups(self.directory, self.disk, lambda *news: self.agent.blocks_read(*news))
        namespace = msgspec.structs.replace(
            worker.kv_namespace, layers=self.geometry.layers, draft_layers=self.geometry.draft_layers
        )
        self.agent = open_agent(self.memory, namespace, self.lookups, wake)
        self.offers = Offers(
            self.directory, self.agent, config.offer_seconds, self.disk, draft_layers=self.geometry.draft_layers
        )
        if self.disk is not None:
            self.disk.open(self.geometry.layers, block_bytes, self.agent.macs)

    def check(self, worker: WorkerIdentity) -> None:
        """Raises InvalidRequest, and NamespaceMismatch if the worker's base layers have another geometry."""
        theirs, ours = geometry_of(worker), self.geometry
        if (theirs.base_layers, theirs.piece_bytes) != (ours.base_layers, ours.piece_bytes):
            raise NamespaceMismatch(
                f"the store keeps blocks of {ours.base_layers} layers of {ours.piece_bytes} bytes, the worker's have "
                f"{theirs.base_layers} of {theirs.piece_bytes}: give it a store of its own"
            )

    def close(self) -> None:
        """End all transfers, the calls that wait for them, and the disk's work."""
        self.agent.close()
        self.offers.close()
        if self.disk is not None:
            self.disk.close()

    def tell(self, figures: TenantFigures) -> None:
        figures.set("memory", self.directory.tenant_blocks, self.directory.evicted_by_quota)
        if self.disk is not None:
            figures.set("disk", self.disk.tenant_blocks, self.disk.evicted_by_quota)

    def apply_events(self) -> None:
        """Apply the events that the transfer thread reported."""
        for event in self.agent.events():
            if isinstance(event, Landed):
                self.offers.landed(event)
            elif isinstance(event, LandingFailed):
                self.offers.failed(event)
