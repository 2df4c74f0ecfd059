"""A rank's side of the KV stores, in its service process: sessions for the rank, and offers of what it computed."""

import asyncio
from collections.abc import Sequence

from kvstore.store_link import StoreLink
from kvstore.store_user import StoreUser
from mesh.channel import Channels
from mesh.domain.workers import WorkerIdentity
from mesh.rendezvous import rendezvous
from transfer.events import PushEnded


class StoreClient:
    """Keeps a session with each configured store, and offers blocks to the one that keeps their chain."""

    def __init__(
        self, endpoints: Sequence[str], worker: WorkerIdentity, user: StoreUser, channels: Channels, rank: int = 0
    ) -> None:
        """`endpoints` are host:port of the stores' gRPC; `rank` is the user's number in its worker."""
        self._links = [StoreLink(endpoint, worker, rank, user, channels) for endpoint in endpoints]

    async def run(self) -> None:
        """Attach, renew, and carry offers until cancelled. A store that is away disturbs nobody."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.run())

    @property
    def attached(self) -> list[str]:
        """Ids of the stores that have a session now."""
        return [link.store_id for link in self._links if link.store_id is not None]

    def offer(self, chain: Sequence[bytes], tenant: bytes = b"", drafts_end: int | None = None) -> None:
        """Offer the full blocks of a prompt or an answer: hashes of the whole chain, from its root on, and whose they
        are (`mesh.domain.shares.tenant_tag`). From the block `drafts_end` on their draft layers are not whole, and are
        not offered; None if all are.

        Returns at once. What was offered before is left out, so that a chain may be offered whenever it has grown;
        where too many offers wait, this one is dropped.
        """
        if not chain:
            return
        store_id = rendezvous(self.attached, chain[0])
        for link in self._links:
            if store_id is not None and link.store_id == store_id:
                link.offers.put(chain, tenant, drafts_end)
                return

    def push_ended(self, event: PushEnded) -> bool:
        """The rank's push ended; False where it belongs to no offer that is under way."""
        return any(link.offers.push_ended(event) for link in self._links)
