"""One rank and the KV stores: each rank has its own sessions, and offers the blocks of its own pool."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from kvstore.store_user import StoreUser
from mesh.domain.shares import tenant_tag
from mesh.errors import EngineFailed
from transfer.events import PushEnded
from transfer.ticket import StoreSession, Ticket
from worker.chains import Chains

# Most chains that a store is offered when it attaches, or attaches again, of those that the rank has already.
MAX_OFFERED_AGAIN = 256


class Stores(Protocol):
    """The KV stores, as `kvstore.client.StoreClient` implements them."""

    @property
    def attached(self) -> list[str]:
        """Ids of the stores that take offers now."""
        ...

    async def run(self) -> None: ...

    def offer(self, chain: Sequence[bytes], tenant: bytes, drafts_end: int | None) -> None: ...

    def push_ended(self, event: PushEnded) -> bool: ...


class RankStores:
    """A `kvstore.store_user.StoreUser` that passes everything on to its rank, unless the rank has died."""

    def __init__(self, rank: StoreUser, chains: Chains, connect: Callable[[StoreUser], Stores]) -> None:
        """`chains`: the rank's reusable blocks; `connect`: makes the client of the stores."""
        self._rank = rank
        self._chains = chains
        # Whether a store attached that was not offered anything yet.
        self._store_came = False
        self._stores = connect(self)

    @property
    def attached(self) -> list[str]:
        """Ids of the stores that have a session with the rank now."""
        return self._stores.attached

    async def run(self) -> None:
        """Attach, renew, and carry offers, until cancelled."""
        await self._stores.run()

    def offer_stored(self, blocks: Sequence[bytes]) -> None:
        """These blocks have become reusable: offer the chains that end in them."""
        if blocks and self._stores.attached:
            self._offer(self._chains.ending_in(blocks))

    def offer_to_newcomers(self) -> None:
        """If a store attached since the last call, offer it the newest chains."""
        if self._store_came:
            self._store_came = False
            self._offer(self._chains.newest(MAX_OFFERED_AGAIN))

    def _offer(self, chains: Sequence[Sequence[bytes]]) -> None:
        for chain in chains:
            self._stores.offer(chain, tenant_tag(self._chains.tenant_of(chain)), self._chains.drafts_end(chain))

    def push_ended(self, event: PushEnded) -> bool:
        """False if the push did not belong to an offer."""
        return self._stores.push_ended(event)

    def attach_store(self, session: StoreSession) -> None:
        self._store_came = True
        with suppress(EngineFailed):
            self._rank.attach_store(session)

    def detach_store(self, store_id: str) -> None:
        with suppress(EngineFailed):
            self._rank.detach_store(store_id)

    def push_offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> None:
        with suppress(EngineFailed):
            self._rank.push_offer(ticket, hashes)
