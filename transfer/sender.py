"""Sending: gathers blocks into slots, hands them to UCX, tells the receiver their digests, brings every slot back."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesh.observe import span
from transfer.mailbox import Mailbox
from transfer.memory import KvMemory, Pending
from transfer.push import PushState
from transfer.seal import Kind, seal
from transfer.segments import Tile
from transfer.slots import Direction, SlotPool
from transfer.tags import segment_tag
from transfer.tally import Tally
from transfer.ticket import SegmentDigest
from transfer.transport import Transmission, Transport

# A peer that has not taken a segment so long after it was given up is frozen or gone: its connection is closed. UCX
# tells of neither by itself, over shared memory not even of a peer that was killed while it owed an answer.
_LINGER_SECONDS = 3.0


@dataclass(eq=False)
class Outgoing:
    """A transfer from this process: its state, what goes where, and who wants to hear of it."""

    push: PushState
    tiles: Sequence[Tile]
    # Worker address of each segment.
    addresses: Sequence[bytes]
    # Of the landing: see `ticket.Ticket`.
    tag: int
    secret: bytes
    blocks: Sequence[int]
    # Called once; from then on nothing reads the blocks.
    ended: Callable[["Outgoing"], None]
    # On the caller's clock: when all of it was computed and none of it sent; None where that never was.
    whole_at: float | None = None
    sent_bytes: int = 0
    transport: str = "unknown"


@dataclass(eq=False)
class _Gather:
    outgoing: Outgoing
    index: int
    slot: int
    size_bytes: int
    digest: Pending[bytes]


@dataclass(eq=False)
class _Send:
    outgoing: Outgoing
    index: int
    slot: int
    size_bytes: int
    digest: bytes
    transmission: Transmission
    # Of its digest, once it was told.
    announcement: Transmission | None = None
    # Of one that was given up.
    lingers_until: float | None = None

    @property
    def completed(self) -> bool:
        """UCX has done with its slot, and with its digest, where that is wanted."""
        if self.announcement is not None:
            return self.transmission.completed and self.announcement.completed
        return self.transmission.completed and (self.outgoing.push.ended or self.transmission.error() is not None)

    def error(self) -> str | None:
        """Of a completed one."""
        return self.transmission.error() or (self.announcement.error() if self.announcement else None)


class Sender:
    """Open pushes take turns, one segment each; one peer holds at most half of the slots, as it may be frozen."""

    def __init__(
        self,
        transport: Transport,
        mailbox: Mailbox,
        memory: KvMemory,
        slots: SlotPool,
        staging: Sequence[Any],
        sent_bytes: Tally,
    ) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._memory = memory
        self._slots = slots
        self._staging = staging
        self._sent_bytes = sent_bytes
        # Whose turn it is stands first.
        self._open: deque[Outgoing] = deque()
        # In the order in which they began, which they end in.
        self._gathers: deque[_Gather] = deque()
        self._sends: list[_Send] = []

    @property
    def in_flight(self) -> bool:
        """Whether a buffer is the memory's, or UCX's."""
        return bool(self._gathers or self._sends)

    def deadlines(self) -> list[float]:
        lingering = [send.lingers_until for send in self._sends if send.lingers_until is not None]
        return [outgoing.push.deadline for outgoing in self._open] + lingering

    def open(self, outgoing: Outgoing) -> None:
        self._open.append(outgoing)
        self._memory.expect(outgoing.secret)
        self._end_if_done(outgoing)

    def give_up(self, outgoing: Outgoing, error: str) -> None:
        """`ended` was called, or is now; slots under way follow when UCX lets go of them."""
        outgoing.push.fail(error)
        self._end_if_done(outgoing)

    def turn(self, now: float) -> bool:
        """Do what can be done now; returns whether there was something. Begins to gather one segment at most."""
        finished = self._finish_sends()
        # What is gathered goes before the next is begun, and bytes before words: they are the longest on their way.
        sent = self._send_gathered()
        begun = not self._gathers and self._begin_one()
        # Of memory that copies at once.
        sent |= self._send_gathered()
        told = self._announce_sent()
        for outgoing in list(self._open):
            if outgoing.push.deadline <= now:
                self.give_up(outgoing, "the landing's deadline passed before all segments were sent")
        self._end_lingering(now)
        return finished or begun or sent or told

    def _begin_one(self) -> bool:
        for _ in range(len(self._open)):
            outgoing = self._open[0]
            self._open.rotate(-1)
            index = outgoing.push.next()
            if index is None or self._share_taken(outgoing.addresses[index]):
                continue
            slot = self._slots.acquire(Direction.SENDING)
            if slot is None:
                self._empty_quarantine()
                return False
            self._begin(outgoing, index, slot)
            return True
        return False

    def _begin(self, outgoing: Outgoing, index: int, slot: int) -> None:
        tile = outgoing.tiles[index]
        size = tile.pieces * self._memory.piece_bytes
        blocks = outgoing.blocks[tile.first_block : tile.first_block + tile.block_count]
        with span("kv.push", first_layer=tile.first_layer, layers=tile.layer_count, size_bytes=size):
            digest = self._memory.gather(
                tile.first_layer, tile.layer_count, blocks, self._staging[slot], outgoing.secret
            )
        outgoing.push.begin(index)
        self._gathers.append(_Gather(outgoing, index, slot, size, digest))

    def _send_gathered(self) -> bool:
        sent = False
        while self._gathers and self._gathers[0].digest.completed:
            self._send(self._gathers.popleft())
            sent = True
        return sent

    def _send(self, gather: _Gather) -> None:
        outgoing, index = gather.outgoing, gather.index
        staged = self._staging[gather.slot][: gather.size_bytes]
        transmission = self._transport.send(outgoing.addresses[index], segment_tag(outgoing.tag, index), staged)
        self._sends.append(_Send(outgoing, index, gather.slot, gather.size_bytes, gather.digest.result(), transmission))

    def _announce_sent(self) -> bool:
        told = False
        for send in self._sends:
            if send.announcement is None and not send.outgoing.push.ended:
                transport = self._transport.carrier(send.outgoing.addresses[send.index])
                # With the first message to a peer it is not known before that has arrived.
                arrived = send.transmission.completed and send.transmission.error() is None
                if transport is not None or arrived:
                    self._announce(send, transport or "unknown")
                    told = True
        return told

    def _announce(self, send: _Send, transport: str) -> None:
        outgoing = send.outgoing
        outgoing.transport = transport
        digest = SegmentDigest(send.index, send.size_bytes, send.digest, transport)
        sealed = seal(Kind.DIGEST, outgoing.secret, digest)
        send.announcement = self._mailbox.send(outgoing.addresses[send.index], outgoing.tag, sealed)

    def _finish_sends(self) -> bool:
        done = [send for send in self._sends if send.completed]
        if done:
            self._sends = [send for send in self._sends if send not in done]
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
        for send in self._sends:
            if send.outgoing is outgoing:
                self._slots.quarantine(send.slot)
        outgoing.ended(outgoing)

    def _drop_gathers(self, outgoing: Outgoing) -> None:
        """Of one that was given up."""
        dropped = [gather for gather in self._gathers if gather.outgoing is outgoing]
        self._gathers = deque(gather for gather in self._gathers if gather.outgoing is not outgoing)
        for gather in dropped:
            # Its blocks are read until then.
            gather.digest.result()
            self._slots.release(gather.slot)

    def _share_taken(self, address: bytes) -> bool:
        under_way: list[_Gather | _Send] = [*self._gathers, *self._sends]
        held = sum(each.outgoing.addresses[each.index] == address for each in under_way)
        return held >= max(1, self._slots.total // 2)

    def _given_up(self) -> list[_Send]:
        """Those in quarantine."""
        return [send for send in self._sends if send.outgoing.push.ended]

    def _end_lingering(self, now: float) -> None:
        given_up = self._given_up()
        for send in given_up:
            if send.lingers_until is None:
                send.lingers_until = now + _LINGER_SECONDS
        self._hang_up([send for send in given_up if send.lingers_until is not None and send.lingers_until <= now])

    def _empty_quarantine(self) -> None:
        """Only where nothing but quarantine holds the slots."""
        given_up = self._given_up()
        if len(given_up) == len(self._sends) and not self._gathers:
            self._hang_up(given_up)

    def _hang_up(self, sends: Sequence[_Send]) -> None:
        """Fails whatever else goes to those peers."""
        for address in {send.outgoing.addresses[send.index] for send in sends}:
            self._transport.hang_up(address)
