"""Offers under way: blocks reserved, a landing opened, segments granted and confirmed, blocks made visible."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvstore.directory import Directory
from kvstore.keys import keys_of
from kvstore.sessions import Session
from mesh.errors import InvalidRequest, OfferFailed, ShuttingDown, UnknownTransfer
from mesh.metrics import KVSTORE_OFFERS, KVSTORE_STORED_BLOCKS
from transfer.events import Granted, Landed, LandingFailed
from transfer.ticket import SegmentDigest, Ticket

# Landings that ended, remembered for confirmations that come again.
_REMEMBERED_LANDINGS = 1024
_NEXT_GRANT_SECONDS = 0.02
# A push of blocks that are all computed: never per layer group.
_ALL_COMPUTED = 0


class Landings(Protocol):
    """The receiving side of `transfer.agent.TransferAgent`."""

    def open_landing(
        self,
        blocks: Sequence[int],
        tokens: int,
        attempt: int,
        deadline_seconds: float,
        sender_slot_bytes: int | None,
    ) -> Ticket: ...

    def pushed(self, digest: SegmentDigest) -> None: ...

    def cancel_landing(self, transfer_id: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class OfferAnswer:
    """`ticket` is None where no block is wanted."""

    ticket: Ticket | None = None
    # Counted within the offer.
    wanted: Sequence[int] = ()
    granted: Sequence[int] = ()
    parent_missing: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """After a confirmation: either all is stored, or further segments may be pushed."""

    stored_blocks: int = 0
    granted: Sequence[int] = ()


@dataclass(slots=True)
class _Landing:
    session_id: int
    ticket: Ticket
    blocks: Sequence[int]
    # Segments granted, and not told to the worker yet.
    granted: list[int] = field(default_factory=list)
    # Grants told are credits: which segments it pushes for them is the worker's choice.
    told: int = 0
    confirmed: set[int] = field(default_factory=set)
    stored: bool = False
    failure: str | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def may_push(self) -> bool:
        """Whether the worker was told of grants that it has not used yet."""
        return self.told > len(self.confirmed)

    def take_grants(self) -> list[int]:
        taken, self.granted = self.granted, []
        self.told += len(taken)
        return taken

    async def changed(self) -> None:
        self.news.clear()
        await self.news.wait()


class Offers:
    """Every landing that an offer opened. For one event loop; blocks are visible once their landing has landed."""

    def __init__(self, directory: Directory, landings: Landings, landing_seconds: float) -> None:
        self._directory = directory
        self._landings = landings
        self._landing_seconds = landing_seconds
        self._open: dict[bytes, _Landing] = {}
        # Oldest first.
        self._ended: OrderedDict[bytes, _Landing] = OrderedDict()

    async def offer(self, session: Session, parent_hash: bytes, hashes: Sequence[bytes]) -> OfferAnswer:
        """Open a landing for the blocks that are lacking and have room; returns once a segment may be pushed.

        Raises OfferFailed where none may be within the landing's deadline.
        """
        parent = session.digest + parent_hash if parent_hash else None
        reservation = self._directory.reserve(parent, keys_of(session.digest, hashes))
        if reservation is None or not reservation.blocks:
            KVSTORE_OFFERS.labels("unwanted").inc()
            return OfferAnswer(parent_missing=reservation is None)
        ticket = self._landings.open_landing(
            reservation.blocks, _ALL_COMPUTED, 0, self._landing_seconds, session.slot_bytes
        )
        landing = self._open[ticket.transfer_id] = _Landing(session.session_id, ticket, reservation.blocks)
        try:
            while not landing.granted:
                self._raise_failure(landing)
                await landing.changed()
        except asyncio.CancelledError:
            # The worker waits no longer, and will never push.
            self._landings.cancel_landing(ticket.transfer_id)
            raise
        # The slab is for every namespace of its geometry; this landing is for the worker's own.
        ticket = msgspec.structs.replace(ticket, namespace=session.namespace)
        return OfferAnswer(ticket, reservation.wanted, landing.take_grants())

    async def confirm(self, session: Session, digests: Sequence[SegmentDigest]) -> Progress:
        """Take digests of one transfer; returns once all is stored, or as soon as the worker has segments to push.

        Raises InvalidRequest, UnknownTransfer, OfferFailed.
        """
        landing = self._of(session, digests)
        for digest in digests:
            if digest.segment not in landing.confirmed:
                landing.confirmed.add(digest.segment)
                self._landings.pushed(digest)
        if landing.may_push and not landing.granted and landing.told < len(landing.ticket.segments):
            # What was confirmed now usually brings a grant; the worker has others to push meanwhile.
            with suppress(TimeoutError):
                async with asyncio.timeout(_NEXT_GRANT_SECONDS):
                    await landing.changed()
        while not landing.stored:
            self._raise_failure(landing)
            if landing.granted or landing.may_push:
                return Progress(granted=landing.take_grants())
            await landing.changed()
        return Progress(stored_blocks=len(landing.blocks))

    def withdraw(self, session: Session, transfer_id: bytes) -> None:
        """The worker will push no more of it. One that ended, or is another session's, is left alone."""
        landing = self._open.get(transfer_id)
        if landing is not None and landing.session_id == session.session_id:
            self._landings.cancel_landing(transfer_id)

    def granted(self, event: Granted) -> None:
        landing = self._open.get(event.transfer_id)
        if landing is not None:
            landing.granted.append(event.segment)
            landing.news.set()

    def landed(self, event: Landed) -> None:
        landing = self._open[event.transfer_id]
        self._directory.store(landing.blocks)
        landing.stored = True
        KVSTORE_OFFERS.labels("stored").inc()
        KVSTORE_STORED_BLOCKS.inc(len(landing.blocks))
        self._end(landing)

    def failed(self, event: LandingFailed) -> None:
        landing = self._open[event.transfer_id]
        self._directory.abandon(landing.blocks)
        landing.failure = f"the landing failed ({event.reason}): {event.message}"
        KVSTORE_OFFERS.labels("failed").inc()
        self._end(landing)

    def close(self) -> None:
        """No event will come any more: what is open has failed."""
        for transfer_id in list(self._open):
            self.failed(LandingFailed(transfer_id, ShuttingDown.reason, "the store is stopping"))

    def _end(self, landing: _Landing) -> None:
        transfer_id = landing.ticket.transfer_id
        self._ended[transfer_id] = self._open.pop(transfer_id)
        if len(self._ended) > _REMEMBERED_LANDINGS:
            self._ended.popitem(last=False)
        landing.news.set()

    def _of(self, session: Session, digests: Sequence[SegmentDigest]) -> _Landing:
        if len({digest.transfer_id for digest in digests}) != 1:
            raise InvalidRequest("confirm the digests of one transfer, at least one of them", field="digests")
        transfer_id = digests[0].transfer_id
        landing = self._open.get(transfer_id) or self._ended.get(transfer_id)
        if landing is None or landing.session_id != session.session_id:
            raise UnknownTransfer("this session has no such transfer: it expired, or never was")
        if any(digest.segment >= len(landing.ticket.segments) for digest in digests):
            raise InvalidRequest(f"the transfer has {len(landing.ticket.segments)} segments", field="digests.segment")
        return landing

    @staticmethod
    def _raise_failure(landing: _Landing) -> None:
        if landing.failure is not None:
            raise OfferFailed(landing.failure)
