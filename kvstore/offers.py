"""Open offers: blocks are reserved, a landing is opened for them, and once it has landed lookups find them."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvstore.directory import BlockDirectory
from kvstore.disk.tier import DiskTier
from kvstore.keys import keys_of, whole_key
from kvstore.quotas import Tenant
from kvstore.sessions import RankSession
from mesh.errors import OfferFailed, ShuttingDown, UnknownTransfer
from mesh.observe.metrics import KVSTORE_OFFERS, KVSTORE_STORED_BLOCKS
from transfer.events import Landed, LandingFailed
from transfer.ticket import Ticket

# How many ended landings are remembered, for confirmations that come late or again.
_REMEMBERED_LANDINGS = 1024
# Offered blocks are all computed, so they are never pushed per layer group.
_ALL_COMPUTED = 0


class OfferLandings(Protocol):
    """The receiving side of `transfer.agent.TransferAgent`."""

    def open_landing(
        self,
        blocks: Sequence[int],
        tokens: int,
        attempt: int,
        deadline_seconds: float,
        sender_slot_bytes: int | None,
        with_drafts: bool,
    ) -> Ticket: ...

    def cancel_landing(self, transfer_id: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class OfferAnswer:
    """`ticket` is None if no block is wanted."""

    ticket: Ticket | None = None
    # Positions of the wanted hashes in the offer.
    wanted: Sequence[int] = ()
    parent_missing: bool = False


@dataclass(slots=True)
class _OfferLanding:
    session_id: int
    blocks: Sequence[int]
    # Set once the landing has ended; all its blocks are then stored unless it failed.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str | None = None


class Offers:
    """Every landing that an offer opened. Used by one event loop."""

    def __init__(
        self,
        directory: BlockDirectory,
        landings: OfferLandings,
        landing_seconds: float,
        disk: DiskTier | None = None,
        draft_layers: int = 0,
    ) -> None:
        """draft_layers: number of draft layers that the store's blocks have room for."""
        self._directory = directory
        self._draft_layers = draft_layers
        self._landings = landings
        self._landing_seconds = landing_seconds
        self._disk = disk
        self._open: dict[bytes, _OfferLanding] = {}
        # Oldest first.
        self._ended: OrderedDict[bytes, _OfferLanding] = OrderedDict()

    def offer(
        self,
        session: RankSession,
        parent_hash: bytes,
        hashes: Sequence[bytes],
        tenant: Tenant = b"",
        with_drafts: bool = True,
    ) -> OfferAnswer:
        """Open a landing for the blocks that the store lacks and has room for, on account of this tenant. It covers all
        layers if the blocks are offered `with_drafts` and the worker has as many draft layers as the store's blocks
        have room for; otherwise the base layers.

        A landing whose worker never got the answer ends at its deadline.
        """
        whole = with_drafts and 0 < self._draft_layers == session.namespace.draft_layers
        namespace = session.namespace if whole else session.namespace.base
        parent = session.digest + parent_hash if parent_hash else None
        keys = keys_of(session.digest, hashes)
        reservation = self._directory.reserve(parent, [whole_key(key) for key in keys] if whole else keys, tenant)
        if reservation is None or not reservation.blocks:
            KVSTORE_OFFERS.labels("unwanted").inc()
            return OfferAnswer(parent_missing=reservation is None)
        ticket = self._landings.open_landing(
            reservation.blocks, _ALL_COMPUTED, 0, self._landing_seconds, session.slot_bytes, whole
        )
        self._open[ticket.transfer_id] = _OfferLanding(session.session_id, reservation.blocks)
        # The agent writes the first worker's namespace into tickets, but this landing is for this worker's blocks.
        return OfferAnswer(msgspec.structs.replace(ticket, namespace=namespace), reservation.wanted)

    async def confirm(self, session: RankSession, transfer_id: bytes) -> int:
        """The worker has pushed everything. Waits until the blocks are stored, and returns how many there are.

        A caller that was cancelled may call again. Raises UnknownTransfer, OfferFailed.
        """
        landing = self._open.get(transfer_id) or self._ended.get(transfer_id)
        if landing is None or landing.session_id != session.session_id:
            raise UnknownTransfer("this session has no such transfer: it expired, or never was")
        await landing.ended.wait()
        if landing.failure is not None:
            raise OfferFailed(landing.failure)
        return len(landing.blocks)

    def withdraw(self, session: RankSession, transfer_id: bytes) -> None:
        """The worker will push no more of it. An offer that has ended, or belongs to another session, is left alone."""
        landing = self._open.get(transfer_id)
        if landing is not None and landing.session_id == session.session_id:
            self._landings.cancel_landing(transfer_id)

    def landed(self, event: Landed) -> None:
        landing = self._end(event.transfer_id)
        keys = self._directory.store(landing.blocks)
        if self._disk is not None:
            self._disk.stored(keys)
        KVSTORE_OFFERS.labels("stored").inc()
        KVSTORE_STORED_BLOCKS.inc(len(landing.blocks))

    def failed(self, event: LandingFailed) -> None:
        landing = self._end(event.transfer_id)
        self._directory.abandon(landing.blocks)
        landing.failure = f"the landing failed ({event.reason}): {event.message}"
        KVSTORE_OFFERS.labels("failed").inc()

    def close(self) -> None:
        """No more events will come: all open landings have failed."""
        for transfer_id in list(self._open):
            self.failed(LandingFailed(transfer_id, ShuttingDown.reason, "the store is stopping"))

    def _end(self, transfer_id: bytes) -> _OfferLanding:
        landing = self._ended[transfer_id] = self._open.pop(transfer_id)
        if len(self._ended) > _REMEMBERED_LANDINGS:
            self._ended.popitem(last=False)
        landing.ended.set()
        return landing
