"""A KV store in the test's process for ranks in processes of their own. It has the blocks of one chain."""

import asyncio
import time
from collections.abc import Sequence

from mesh.domain.kv_identity import KvNamespace
from tests.support.transfer_peer import KnownChains
from transfer.agent import TransferAgent
from transfer.config import TransferConfig
from transfer.events import Landed, PushEnded
from transfer.host_memory import HostMemory
from transfer.shared_memory import SharedMemory
from transfer.ticket import SlabHandle, StoreSession
from worker.ranks.client import RankClient


class RankStore:
    """A store from which the first `known` blocks of the chain can be fetched."""

    def __init__(
        self, namespace: KvNamespace, hashes: Sequence[bytes], known: int, piece_bytes: int, config: TransferConfig
    ) -> None:
        self.hashes = hashes
        memory = SharedMemory(namespace.layers * len(hashes) * piece_bytes)
        assert memory.handle is not None
        self.handle = SlabHandle(memory.handle, namespace.layers, len(hashes), piece_bytes)
        # Kept, because others map it by a descriptor of this object.
        self._memory = memory
        # [layers, blocks, piece_bytes]
        self.slab = slab = memory.array.reshape(len(hashes), namespace.layers, piece_bytes).transpose(1, 0, 2)
        chains = KnownChains(hashes[:known], range(known))
        self.namespace = namespace
        self.agent = TransferAgent(HostMemory(slab), namespace, config, time.monotonic, lambda: None, chains)

    def session(self, session_id: int, mappable: bool = False) -> StoreSession:
        """A new session of a worker; mappable: it may map the store's memory."""
        key = session_id.to_bytes(32, "big")
        self.agent.open_session(session_id, key)
        slab = self.handle if mappable else None
        return StoreSession("store", "epoch", self.agent.address, session_id, key, self.namespace, slab)

    async def take_offer(self, client: RankClient) -> tuple[Landed, PushEnded]:
        """Have a rank push all of the chain's blocks."""
        ticket = self.agent.open_landing(range(len(self.hashes)), 0, 0, 10.0)
        client.push_offer(ticket, self.hashes)
        async for message in client.results:
            if isinstance(message, PushEnded):
                return await self._until_landed(), message
        raise AssertionError("the rank has gone")

    async def _until_landed(self) -> Landed:
        while True:
            for event in self.agent.events():
                if isinstance(event, Landed):
                    return event
            await asyncio.sleep(0.005)
