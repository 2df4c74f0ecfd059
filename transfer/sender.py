"""Gathers blocks into slots, sends them and their checksums over UCX, and frees every slot."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mesh.observe.spans import span
from transfer.mailbox import Mailbox
from transfer.memory import KvMemory, Pending
from transfer.origin import Origin
from transfer.outgoing import Outgoing
from transfer.seal import Kind, seal
from transfer.slots import Direction, SlotPool
from transfer.tags import segment_tag
from transfer.tally import Tally
from transfer.ticket import Announcement, BlockMac
from transfer.transport import Transmission, Transport

# If a peer has not received a segment this long after it was given up, the peer is frozen or gone, and its connection
# is closed. UCX reports neither case; over shared memory it does not even report a killed peer that owed an answer.
_STUCK_SECONDS = 3.0


@dataclass(eq=False)
class _Gather:
    outgoing: Outgoing
    index: int
    slot: int
    size_bytes: int
    checksum: Pending[bytes]


@dataclass(eq=False)
class _Send:
    outgoing: Outgoing
    index: int
    slot: int
    size_bytes: int
    checksum: bytes
    transmission: Transmission
    # The message with its checksum, once that was sent.
    announcement: Transmission | None = None
    # When the peer is to be disconnected; None until its push was given up.
    disconnect_at: float | None = None

    @property
    def address(self) -> bytes:
        return self.outgoing.addresses[self.index]

    @property
    def completed(self) -> bool:
        """Whether UCX needs neither the slot nor the checksum any more. The checksum of a push that has ended is never
        sent.
        """
        if self.announcement is not None:
            return self.transmission.completed and self.announcement.completed
        return self.transmission.completed and (self.outgoing.push.ended or self.transmission.error() is not None)

    def error(self) -> str | None:
        """What went wrong; None if nothing did. Call it only once the send has completed."""
        return self.transmission.error() or (self.announcement.error() if self.announcement else None)


class Sender:
    """Open pushes take turns, one segment each. A peer may be frozen, so it can hold at most half of the slots."""

    def __init__(
        self,
        transport: Transport,
        mailbox: Mailbox,
        memory: KvMemory,
        slots: SlotPool,
        sent_bytes: Tally,
        origin: Origin | None = None,
    ) -> None:
        """`origin`: of this process, if receivers are to know it."""
        self._transport = transport
        self._mailbox = mailbox
        self._memory = memory
        self._slots = slots
        self._sent_bytes = sent_bytes
        self._origin = origin
        # The first one is next to send.
        self._open: deque[Outgoing] = deque()
        # In order of completion.
        self._gathers: deque[_Gather] = deque()
        self._sends: list[_Send] = []
        # Sends of pushes that were given up; their slots are quarantined.
        self._abandoned: list[_Send] = []

    @property
    def in_flight(self) -> bool:
        """Whether UCX or the memory uses one of our buffers."""
        return bool(self._gathers or self._sends or self._abandoned)

    def deadlines(self) -> list[float]:
        stuck = [send.disconnect_at for send in self._abandoned if send.disconnect_at is not None]
        return [outgoing.push.deadline for outgoing in self._open] + stuck

    def open(self, outgoing: Outgoing) -> None:
        self._open.append(outgoing)
        self._memory.prepare(outgoing.secret)
        self._end_if_done(outgoing)

    def give_up(self, outgoing: Outgoing, error: str) -> None:
        """Give up a push. `ended` is called now, unless it was called before. Its slots become free when UCX completes
        their requests.
        """
        outgoing.push.fail(error)
        self._end_if_done(outgoing)

    def poll(self, now: float) -> bool:
        """Do what can be done now, and begin to gather at most one segment. Returns whether anything was done."""
        finished = self._finish_sends()
        # A segment's bytes take longest, so send them before gathering the next segment and before any checksum.
        sent = self._send_gathered()
        begun = not self._gathers and self._gather_next()
        # In host memory the gather has completed already.
        sent |= self._send_gathered()
        announced = self._announce_sent()
        for outgoing in [each for each in self._open if each.push.deadline <= now]:
            self.give_up(outgoing, "the landing's deadline passed before all segments were sent")
        if self._abandoned:
            self._disconnect_stuck(now)
        return finished or begun or sent or announced

    def _gather_next(self) -> bool:
        for _ in range(len(self._open)):
            outgoing = self._open[0]
            self._open.rotate(-1)
            index = outgoing.push.next_segment()
            if index is None or self._holds_its_share(outgoing.addresses[index]):
                continue
            slot = self._slots.acquire(Direction.SENDING)
            if slot is None:
                self._empty_quarantine()
                return False
            self._gather(outgoing, index, slot)
            return True
        return False

    def _gather(self, outgoing: Outgoing, index: int, slot: int) -> None:
        tile = outgoing.tiles[index]
        size = tile.pieces * self._memory.piece_bytes
        blocks = outgoing.blocks[tile.first_block : tile.first_block + tile.block_count]
        with span("kv.push", first_layer=tile.first_layer, layers=tile.layer_count, size_bytes=size):
            checksum = self._memory.gather(
                tile.first_layer, tile.layer_count, blocks, self._staged(outgoing, slot), outgoing.secret
            )
        outgoing.push.begin(index)
        self._gathers.append(_Gather(outgoing, index, slot, size, checksum))

    def _send_gathered(self) -> bool:
        sent = False
        while self._gathers and self._gathers[0].checksum.completed:
            self._send(self._gathers.popleft())
            sent = True
        return sent

    def _send(self, gather: _Gather) -> None:
        outgoing, index = gather.outgoing, gather.index
        staged = self._staged(outgoing, gather.slot)[: gather.size_bytes]
        transmission = self._transport.send(outgoing.addresses[index], segment_tag(outgoing.tag, index), staged)
        self._sends.append(
            _Send(outgoing, index, gather.slot, gather.size_bytes, gather.checksum.result(), transmission)
        )

    def _announce_sent(self) -> bool:
        announced = False
        for send in self._sends:
            if send.announcement is None:
                from_host = send.outgoing.to_store or not self._memory.is_on_gpu
                transport = self._transport.transport_name(send.address, from_host)
                # UCX chooses the transport with the first message to a peer, and may not tell until that message has
                # arrived.
                arrived = send.transmission.completed and send.transmission.error() is None
                if transport is not None or arrived:
                    self._announce(send, transport or "unknown")
                    announced = True
        return announced

    def _announce(self, send: _Send, transport: str) -> None:
        outgoing = send.outgoing
        outgoing.transport = transport
        message = Announcement(send.index, send.size_bytes, send.checksum, transport, self._macs_of(send), self._origin)
        sealed = seal(Kind.ANNOUNCEMENT, outgoing.secret, message)
        send.announcement = self._mailbox.send(send.address, outgoing.tag, sealed)

    def _macs_of(self, send: _Send) -> tuple[BlockMac | None, ...]:
        outgoing = send.outgoing
        if outgoing.macs is None:
            return ()
        tile = outgoing.tiles[send.index]
        return outgoing.macs.macs_of(tile, partial(self._memory.tags, self._staged(outgoing, send.slot), tile))

    def _staged(self, outgoing: Outgoing, slot: int) -> Any:
        staging = self._slots.staging(slot)
        return self._memory.host_side(staging) if outgoing.to_store else staging

    def _finish_sends(self) -> bool:
        done = [send for send in [*self._sends, *self._abandoned] if send.completed]
        if done:
            self._sends = [send for send in self._sends if send not in done]
            self._abandoned = [send for send in self._abandoned if send not in done]
        for send in done:
            self._slots.release(send.slot)
            self._finish(send)
        return bool(done)

    def _finish(self, send: _Send) -> None:
        outgoing = send.outgoing
        if outgoing.push.ended:
            return
        outgoing.push.sent(send.index)
        error = send.error()
        if error is not None:
            self.give_up(outgoing, f"the receiver was lost: {error}")
            return
        outgoing.sent_bytes += send.size_bytes
        self._sent_bytes.add(outgoing.transport, send.size_bytes)
        self._end_if_done(outgoing)

    def _end_if_done(self, outgoing: Outgoing) -> None:
        if not outgoing.push.ended or outgoing not in self._open:
            return
        self._open.remove(outgoing)
        self._drop_gathers(outgoing)
        self._abandon_sends(outgoing)
        outgoing.ended(outgoing)

    def _drop_gathers(self, outgoing: Outgoing) -> None:
        """Wait for gathers of a push that was given up, and free their slots."""
        dropped = [gather for gather in self._gathers if gather.outgoing is outgoing]
        self._gathers = deque(gather for gather in self._gathers if gather.outgoing is not outgoing)
        for gather in dropped:
            # Until this returns, the gather reads the blocks.
            gather.checksum.result()
            self._slots.release(gather.slot)

    def _abandon_sends(self, outgoing: Outgoing) -> None:
        abandoned = [send for send in self._sends if send.outgoing is outgoing]
        self._sends = [send for send in self._sends if send.outgoing is not outgoing]
        for send in abandoned:
            self._slots.quarantine(send.slot)
        self._abandoned += abandoned

    def _holds_its_share(self, address: bytes) -> bool:
        gathers = sum(gather.outgoing.addresses[gather.index] == address for gather in self._gathers)
        sends = sum(send.address == address for send in [*self._sends, *self._abandoned])
        return gathers + sends >= max(1, self._slots.total // 2)

    def _disconnect_stuck(self, now: float) -> None:
        for send in self._abandoned:
            if send.disconnect_at is None:
                send.disconnect_at = now + _STUCK_SECONDS
        self._disconnect(
            [send for send in self._abandoned if send.disconnect_at is not None and send.disconnect_at <= now]
        )

    def _empty_quarantine(self) -> None:
        """No slot is free to send with. If only quarantined segments hold slots, disconnect their peers."""
        if not self._sends and not self._gathers:
            self._disconnect(self._abandoned)

    def _disconnect(self, sends: Sequence[_Send]) -> None:
        """Disconnect the peers of these sends. All other messages to them fail too."""
        for address in {send.address for send in sends}:
            self._transport.disconnect(address)
