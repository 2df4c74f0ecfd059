"""A KV store: the product's directory with its leases and eviction, and a link."""

from collections.abc import Sequence

from kvstore.directory import BlockDirectory
from kvstore.keys import keys_of
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import TransferCounters
from scheduler.stores import StoreStatus
from sim.network import Link

_NO_TRANSFERS = TransferCounters()


class SimulatedStore:
    """scheduler.stores.Store, from which workers fetch blocks and to which they offer blocks."""

    def __init__(self, store_id: str, blocks: int, link: Link) -> None:
        self.endpoint = self.store_id = store_id
        self.link = link
        self.directory = BlockDirectory(blocks)
        self.alive = True
        self._status = StoreStatus(store_id, (), 0, 0, 0, _NO_TRANSFERS)

    @property
    def status(self) -> StoreStatus | None:
        return self._status if self.alive else None

    async def match(self, namespace: KvNamespace, chain: Sequence[bytes]) -> StoreTarget | None:
        blocks = self.lease(namespace, chain)
        self.directory.release(blocks)
        return StoreTarget(self.store_id, len(blocks)) if blocks else None

    def lease(self, namespace: KvNamespace, chain: Sequence[bytes]) -> list[int]:
        """Lease the blocks of the longest stored prefix of the chain."""
        return self.directory.match(keys_of(namespace.digest, chain)) if self.alive else []

    def put(self, namespace: KvNamespace, parent: bytes, block_hash: bytes) -> bool:
        """Store one offered block. False if the block is stored already, its parent is not, or there is no room."""
        digest = namespace.digest
        reservation = self.directory.reserve(digest + parent if parent else None, [digest + block_hash])
        if not self.alive or reservation is None or not reservation.blocks:
            return False
        self.directory.store(reservation.blocks)
        return True

    def die(self) -> None:
        self.alive = False

    def restart(self) -> None:
        """Start again with no blocks."""
        self.directory, self.alive = BlockDirectory(self.directory.total_blocks), True
