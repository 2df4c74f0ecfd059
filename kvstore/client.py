"""A rank's client of the KV stores, in its service process: sessions for the rank, and offers of what it computed."""

import asyncio
from collections.abc import Sequence

from kvstore.store_link import StoreLink
from kvstore.store_user import StoreUser
from mesh.domain.workers import WorkerIdentity
from mesh.rendezvous import rendezvous
from mesh.rpc.channel import Channels
from transfer.events import PushEnded


class StoreClient:
    """Keeps a session with each configured store, and offers each chain's blocks to the store that keeps the chain."""

    def __init__(
        self, endpoints: Sequence[str], worker: WorkerIdentity, user: StoreUser, channels: Channels, rank: int = 0
    ) -> None:
        """`endpoints`: host:port of the stores' gRPC servers; `rank`: the user's number in its worker."""
        self._links = [StoreLink(endpoint, worker, rank, user, channels) for endpoint in endpoints]

    async def run(self) -> None:
        """Attach, renew, and carry offers until cancelled. A store that is away affects no other."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.run())

    @property
    def attached(self) -> list[str]:
        """Ids of the stores that have a session now."""
        return [link.store_id for link in self._links if link.store_id is not None]

    def offer(self, chain: Sequence[bytes], tenant: bytes = b"", drafts_end: int | None = None) -> None:
        """Offer the full blocks of a prompt or an answer.

        chain: the hashes of the whole chain, from its root on; tenant: the owner's tag
        (`mesh.domain.shares.tenant_tag`); drafts_end: from this block on the draft layers are incomplete and are not
        offered; None if all are complete.

        Returns at once. Blocks that were offered before are left out, so a chain may be offered each time it grows. If
        too many offers wait, this one is dropped.
        """
        if not chain:
            return
        store_id = rendezvous(self.attached, chain[0])
        for link in self._links:
            if store_id is not None and link.store_id == store_id:
                link.offers.put(chain, tenant, drafts_end)
                return

    def push_ended(self, event: PushEnded) -> bool:
        """Note that a push of the rank ended. False if it belongs to no open offer."""
        return any(link.offers.push_ended(event) for link in self._links)
