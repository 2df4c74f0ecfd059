"""Receives messages into slots, copies verified segments from slots into blocks, and frees every slot."""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from transfer.incoming import Incoming
from transfer.landing import (
    DEADLINE_EXCEEDED,
    NOT_BELIEVED,
    SENDER_LOST,
    WRONG_CHECKSUM,
    WRONG_SIZE,
    Phase,
)
from transfer.mailbox import Mailbox
from transfer.memory import KvMemory, Pending
from transfer.origin import LocalTcp
from transfer.seal import WRONG_MAC, Kind, unseal
from transfer.segments import Tile
from transfer.slots import Direction, SlotPool
from transfer.tags import segment_of
from transfer.tally import Tally
from transfer.ticket import Announcement
from transfer.transport import Arrival, Transmission, Transport


@dataclass(eq=False)
class _Receive:
    incoming: Incoming
    index: int
    slot: int
    transmission: Transmission


@dataclass(eq=False)
class _Copy:
    """A segment that is being verified and copied to its blocks."""

    incoming: Incoming
    index: int
    # For a segment in a slot, whether its checksum was right; for one read where it lies with the sender, why it must
    # not be used, None if it may be.
    landed: Pending[bool] | Pending[str | None]


class Receiver:
    """A segment gets a slot only when its message arrives, so segments that are not computed yet hold none.

    If no slot is free, the bytes wait with the sender.
    """

    def __init__(
        self,
        transport: Transport,
        mailbox: Mailbox,
        memory: KvMemory,
        slots: SlotPool,
        refused: Tally,
        received_bytes: Tally,
        local_tcp: LocalTcp,
    ) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._memory = memory
        self._slots = slots
        self._refused = refused
        self._received_bytes = received_bytes
        self._local_tcp = local_tcp
        self._open: set[Incoming] = set()
        # Keyed by each of their tags.
        self._by_tag: dict[int, Incoming] = {}
        # Segments that wait for a slot, with their messages.
        self._waiting: deque[tuple[Incoming, int, Arrival]] = deque()
        self._receives: list[_Receive] = []
        self._verifiable: deque[tuple[Incoming, int]] = deque()
        # In order of completion.
        self._copies: deque[_Copy] = deque()

    @property
    def in_flight(self) -> bool:
        """Whether UCX or the memory uses one of our buffers."""
        return bool(self._receives or self._copies)

    def deadlines(self) -> list[float]:
        return [incoming.deadline for incoming in self._open]

    def open(self, incoming: Incoming) -> None:
        self._open.add(incoming)
        self._by_tag |= dict.fromkeys(incoming.tags, incoming)
        self._memory.prepare(incoming.secret)
        self._end_if_over(incoming)

    def accept(self, arrival: Arrival) -> bool:
        """Receive the message. False if its tag belongs to no open transfer."""
        incoming = self._by_tag.get(arrival.tag)
        if incoming is None:
            return False
        index = segment_of(arrival.tag, incoming.tag)
        if index is None:
            self._mailbox.receive(arrival, incoming.max_announcement_bytes, partial(self._announced, incoming))
        else:
            self._segment_arrived(incoming, index, arrival)
        return True

    def _segment_arrived(self, incoming: Incoming, index: int, arrival: Arrival) -> None:
        reason = incoming.arrive(index, arrival.size_bytes)
        if reason is None:
            self._waiting.append((incoming, index, arrival))
            # Start at once, before anything else: the bytes take longest.
            self._start_receives()
            return
        self._refused.add(reason)
        self._transport.discard(arrival)
        if reason == WRONG_SIZE:
            self.give_up(incoming, NOT_BELIEVED, "a segment came with a wrong size")

    def _announced(self, incoming: Incoming, sealed: bytes) -> None:
        """Handle an announcement: a segment's checksum, and the MACs of its blocks."""
        if incoming not in self._open:
            # The transfer ended meanwhile.
            return
        announcement = unseal(Kind.ANNOUNCEMENT, incoming.secret, sealed, Announcement)
        reason = WRONG_MAC if announcement is None else incoming.announce(announcement)
        if reason is not None:
            self._refused.add(reason)
        if reason == WRONG_SIZE:
            self.give_up(incoming, NOT_BELIEVED, "the sender announced a segment of a wrong size")
        elif announcement is not None and reason is None:
            if incoming.source is not None:
                incoming.refer(announcement.segment)
            origin, named = announcement.origin, announcement.transport
            incoming.transports.add(self._local_tcp.see(origin, named, announcement.size_bytes))
            self._verify_later(incoming, announcement.segment)

    def give_up(self, incoming: Incoming, reason: str, message: str) -> None:
        """Give up a transfer. `on_end` is called now, unless it was called before. Later messages are dropped."""
        incoming.fail(reason, message)
        self._end_if_over(incoming)

    def poll(self, now: float) -> bool:
        """Do what can be done now, and begin to verify at most one segment. Returns whether anything was done."""
        started, finished = self._start_receives(), self._finish_receives()
        verifying, verified = self._verify_one(), self._end_verified()
        for incoming in [each for each in self._open if each.deadline <= now]:
            self.give_up(incoming, DEADLINE_EXCEEDED, "the landing's deadline passed before all segments came")
        return started or finished or verifying or verified

    def _start_receives(self) -> bool:
        started = False
        while self._waiting:
            incoming, index, arrival = self._waiting[0]
            if incoming.ended:
                self._transport.discard(arrival)
            else:
                slot = self._slots.acquire(Direction.RECEIVING)
                if slot is None:
                    break
                incoming.receive(index, slot)
                received = self._received(incoming, slot)[: arrival.size_bytes]
                transmission = self._transport.receive(arrival, received)
                self._receives.append(_Receive(incoming, index, slot, transmission))
            self._waiting.popleft()
            started = True
        return started

    def _finish_receives(self) -> bool:
        done = [receive for receive in self._receives if receive.transmission.completed]
        if done:
            self._receives = [receive for receive in self._receives if not receive.transmission.completed]
        for receive in done:
            self._finish(receive)
        return bool(done)

    def _finish(self, receive: _Receive) -> None:
        incoming = receive.incoming
        if incoming.ended:
            # The slot was quarantined until now.
            self._slots.release(receive.slot)
            return
        incoming.received(receive.index)
        error = receive.transmission.error()
        if error is not None:
            self.give_up(incoming, SENDER_LOST, f"the sender was lost: {error}")
        else:
            self._memory.received(self._received(incoming, receive.slot), self._size(incoming.tiles[receive.index]))
            self._verify_later(incoming, receive.index)

    def _verify_later(self, incoming: Incoming, index: int) -> None:
        if incoming.verifiable(index):
            self._verifiable.append((incoming, index))

    def _verify_one(self) -> bool:
        if not self._verifiable:
            return False
        incoming, index = self._verifiable.popleft()
        # The transfer may have ended meanwhile.
        if incoming.verifiable(index):
            if incoming.source is not None:
                self._copies.append(_Copy(incoming, index, incoming.source.take(incoming, index)))
            else:
                self._begin_copy(incoming, index)
        return True

    def _begin_copy(self, incoming: Incoming, index: int) -> None:
        """Verify a segment in its slot, and copy it to its blocks."""
        refusal = self._refusal_of_macs(incoming, index)
        if refusal is not None:
            self._refused.add(refusal)
            self.give_up(incoming, NOT_BELIEVED, "no worker of this namespace vouches for a segment's blocks")
            return
        tile = incoming.tiles[index]
        blocks = incoming.blocks[tile.first_block : tile.first_block + tile.block_count]
        layers, staging = (tile.first_layer, tile.layer_count), self._received(incoming, incoming.slot(index))
        landed = self._memory.land(*layers, blocks, staging, incoming.secret, incoming.checksum(index))
        self._copies.append(_Copy(incoming, index, landed))

    def _refusal_of_macs(self, incoming: Incoming, index: int) -> str | None:
        if incoming.mac_sink is None:
            return None
        tile = incoming.tiles[index]
        check = incoming.mac_sink.check(tile, incoming.macs(index))
        if isinstance(check, str):
            return check
        staging = self._received(incoming, incoming.slot(index))
        return check.refusal(self._memory.tags(staging, tile, check.keyed) if check.keyed else ())

    def _received(self, incoming: Incoming, slot: int) -> Any:
        staging = self._slots.staging(slot)
        return self._memory.host_side(staging) if incoming.from_store else staging

    def _end_verified(self) -> bool:
        ended = False
        while self._copies and self._copies[0].landed.completed:
            self._end_copy(self._copies.popleft())
            ended = True
        return ended

    def _end_copy(self, copy: _Copy) -> None:
        incoming, landed = copy.incoming, copy.landed.result()
        if landed is None or landed is True:
            slot = incoming.land(copy.index)
            if slot is not None:
                self._slots.release(slot)
            self._received_bytes.add(incoming.transport, self._size(incoming.tiles[copy.index]))
            self._end_if_over(incoming)
        elif landed is False:
            self._refused.add(WRONG_CHECKSUM)
            self.give_up(incoming, NOT_BELIEVED, "a segment's bytes are not those that its sender announced")
        else:
            self._refused.add(landed)
            self.give_up(incoming, NOT_BELIEVED, f"what was read from the sender's memory is refused: {landed}")

    def _size(self, tile: Tile) -> int:
        return tile.pieces * self._memory.piece_bytes

    def _end_if_over(self, incoming: Incoming) -> None:
        if incoming.ended and incoming in self._open:
            self._close(incoming)

    def _close(self, incoming: Incoming) -> None:
        self._open.remove(incoming)
        for tag in incoming.tags:
            del self._by_tag[tag]
        self._drop_copies(incoming)
        for slot in incoming.slots(Phase.RECEIVED):
            self._slots.release(slot)
        for slot in incoming.slots(Phase.RECEIVING):
            self._slots.quarantine(slot)
        incoming.on_end(incoming)

    def _drop_copies(self, incoming: Incoming) -> None:
        """Wait for copies of a transfer that was given up: they read slots and write blocks."""
        for copy in self._copies:
            if copy.incoming is incoming:
                copy.landed.result()
        self._copies = deque(copy for copy in self._copies if copy.incoming is not incoming)
