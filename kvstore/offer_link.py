"""Offers of one worker to one store: queued, sent, pushed by the rank, confirmed. They never delay a token.

The store answers an offer with a landing for the blocks that it wants. Once they are pushed, the worker asks for a
confirmation, which the store sends when all of them are stored.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from deepmesh.internal.v1 import kvstore_pb2

from kvstore.store_user import StoreUser
from mesh.cancellation import check_cancelled
from mesh.errors import InvalidRequest, MeshError, NamespaceMismatch, OfferFailed, Retry, UnknownSession
from mesh.observe.metrics import STORE_OFFERS
from mesh.observe.spans import span
from transfer import wire as transfer_wire
from transfer.events import PushEnded
from transfer.ticket import StoreSession, Ticket

log = logging.getLogger(__name__)

# Offers that may be open at once. Each holds blocks of the worker and a landing of the store.
CONCURRENT_OFFERS = 4
MAX_WAITING_OFFERS = 256
# Hashes remembered as offered in this session, about 100 bytes each.
MAX_OFFERED_HASHES = 100_000
ANSWER_SECONDS = 5.0
# A single offer may fail: its blocks were evicted meanwhile. The log tells once of a run of this length.
TOLD_FAILURES = 3


class _Offer(NamedTuple):
    """A chain from its root on, its tenant, and whether its blocks have draft layers."""

    hashes: Sequence[bytes]
    tenant: bytes
    with_drafts: bool


class _Chain(NamedTuple):
    """A chain that waits to be offered; its blocks before `drafts_end` have draft layers."""

    hashes: Sequence[bytes]
    tenant: bytes
    drafts_end: int

    def offers(self) -> Iterator[_Offer]:
        """The chain's offers, to be made one after the other."""
        if self.drafts_end:
            yield _Offer(self.hashes[: self.drafts_end], self.tenant, with_drafts=True)
        if self.drafts_end < len(self.hashes):
            yield _Offer(self.hashes, self.tenant, with_drafts=False)


class OfferLink:
    def __init__(self, user: StoreUser, doubt: asyncio.Event) -> None:
        """`doubt` is set if the store does not know the session any more, or does not answer."""
        self._user = user
        self._doubt = doubt
        self._session: StoreSession | None = None
        self._waiting: asyncio.Queue[_Chain] = asyncio.Queue(MAX_WAITING_OFFERS)
        # An ordered set, least recently offered first.
        self._offered: OrderedDict[bytes, None] = OrderedDict()
        # Keyed by transfer id.
        self._pushes: dict[bytes, asyncio.Future[PushEnded]] = {}
        # How many offers have failed since one was stored.
        self._failures = 0

    def begin(self, session: StoreSession) -> None:
        """Use a new session. The store may hold nothing of what was offered in an earlier one."""
        self._session = session
        self._offered.clear()

    def end(self) -> None:
        self._session = None

    def put(self, chain: Sequence[bytes], tenant: bytes = b"", drafts_end: int | None = None) -> None:
        """Queue a chain of this tenant, from its root on. Blocks before `drafts_end` have draft layers, the others do
        not; None if all have them, provided that the worker has draft layers at all. The chain is dropped if the queue
        is full.
        """
        try:
            self._waiting.put_nowait(_Chain(chain, tenant, len(chain) if drafts_end is None else drafts_end))
        except asyncio.QueueFull:
            STORE_OFFERS.labels("dropped").inc()

    def push_ended(self, event: PushEnded) -> bool:
        push = self._pushes.get(event.transfer_id)
        if push is None:
            return False
        # The push may have timed out, and been cancelled, already.
        if not push.done():
            push.set_result(event)
        return True

    async def run(self, stub: Any) -> None:
        """Make one offer after another, until cancelled."""
        while True:
            chain = await self._waiting.get()
            for offer in chain.offers():
                session = self._session
                if session is None:
                    break
                try:
                    with span("store.offer", blocks=len(offer.hashes)):
                        outcome = await self._make_offer(stub, session, offer)
                except (MeshError, TimeoutError) as error:
                    check_cancelled()
                    outcome = self._failed(offer.hashes, error)
                STORE_OFFERS.labels(outcome).inc()

    async def _make_offer(self, stub: Any, session: StoreSession, offer: _Offer) -> str:
        chain = offer.hashes
        first = self._first_not_offered(chain)
        if first == len(chain):
            return "known"
        response = await self._offer(stub, session, offer, first)
        if response.parent_missing and first:
            first = 0
            response = await self._offer(stub, session, offer, first)
        self._remember(chain)
        if not response.HasField("ticket"):
            return "unwanted"
        if any(index >= len(chain) - first for index in response.wanted):
            raise OfferFailed("the store wants blocks that were not offered")
        ticket = transfer_wire.ticket(response.ticket)
        wanted = [chain[first + index] for index in response.wanted]
        await self._store(stub, session, ticket, wanted)
        self._failures = 0
        return "stored"

    async def _offer(self, stub: Any, session: StoreSession, offer: _Offer, first: int) -> kvstore_pb2.OfferResponse:
        request = kvstore_pb2.OfferRequest(
            session_id=session.session_id,
            parent_hash=offer.hashes[first - 1] if first else b"",
            block_hashes=offer.hashes[first:],
            tenant=offer.tenant,
            without_drafts=not offer.with_drafts,
        )
        response: kvstore_pb2.OfferResponse = await stub.Offer(request, timeout=ANSWER_SECONDS)
        return response

    async def _store(self, stub: Any, session: StoreSession, ticket: Ticket, wanted: Sequence[bytes]) -> None:
        """Push the wanted blocks; return once the store has stored all of them."""
        session_id, transfer_id = session.session_id, ticket.transfer_id
        seconds = ticket.deadline_ms / 1000
        try:
            async with asyncio.timeout(seconds):
                await self._push(ticket, wanted)
                confirmation = kvstore_pb2.ConfirmOfferRequest(session_id=session_id, transfer_id=transfer_id)
                await stub.ConfirmOffer(confirmation, timeout=seconds)
        except OfferFailed:
            withdrawal = kvstore_pb2.WithdrawOfferRequest(session_id=session_id, transfer_id=transfer_id)
            await stub.WithdrawOffer(withdrawal, timeout=ANSWER_SECONDS)
            raise

    async def _push(self, ticket: Ticket, wanted: Sequence[bytes]) -> None:
        push = self._pushes[ticket.transfer_id] = asyncio.get_running_loop().create_future()
        try:
            self._user.push_offer(ticket, wanted)
            error = (await push).error
        finally:
            del self._pushes[ticket.transfer_id]
        if error is not None:
            raise OfferFailed(f"the rank could not push it: {error}")

    def _failed(self, chain: Sequence[bytes], error: MeshError | TimeoutError) -> str:
        for block_hash in chain:
            self._offered.pop(block_hash, None)
        if isinstance(error, UnknownSession | TimeoutError) or error.retry is Retry.THIS_CALL:
            self._doubt.set()
        self._failures += 1
        # Warn only of errors that repeat. An absent store is logged by its link.
        repeats = isinstance(error, InvalidRequest | NamespaceMismatch) or self._failures == TOLD_FAILURES
        log.log(
            logging.WARNING if repeats else logging.DEBUG,
            "an offer of %d blocks to a KV store failed, as %d did before since one was stored: %s",
            len(chain),
            self._failures - 1,
            str(error) or type(error).__name__,
        )
        return "failed"

    def _first_not_offered(self, chain: Sequence[bytes]) -> int:
        for index, block_hash in enumerate(chain):
            if block_hash not in self._offered:
                return index
        return len(chain)

    def _remember(self, chain: Sequence[bytes]) -> None:
        for block_hash in reversed(chain):
            self._offered[block_hash] = None
            self._offered.move_to_end(block_hash)
        while len(self._offered) > MAX_OFFERED_HASHES:
            self._offered.popitem(last=False)
