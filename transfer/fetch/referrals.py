"""Answers to workers that map a store's memory: it names the blocks, and the worker copies them."""

from transfer.fetch.mapped_slab import MAPPED
from transfer.host_memory import HostMemory
from transfer.mailbox import Mailbox
from transfer.outgoing import Outgoing
from transfer.seal import Kind, seal
from transfer.tally import Tally
from transfer.ticket import Announcement
from transfer.transport import Transport

# So much of a chain is announced at a time: the worker copies one part while the store reads the next from its disk.
PART_BYTES = 16 << 20


class Referrals:
    """A transfer ends when its worker has said that it copied all, when it is given up, or at its deadline. Until then
    its blocks stay where they are.
    """

    def __init__(self, memory: HostMemory, transport: Transport, mailbox: Mailbox, sent_bytes: Tally) -> None:
        self._memory = memory
        self._transport = transport
        self._mailbox = mailbox
        self._sent_bytes = sent_bytes
        self._open: list[Outgoing] = []

    def deadlines(self) -> list[float]:
        return [outgoing.push.deadline for outgoing in self._open]

    def open(self, outgoing: Outgoing) -> None:
        outgoing.transport = MAPPED
        self._open.append(outgoing)

    def poll(self, now: float) -> bool:
        """Announce at most one segment of each transfer. Returns whether there was one."""
        for outgoing in [each for each in self._open if each.push.deadline <= now]:
            self.give_up(outgoing, "the deadline passed before the worker had copied all blocks")
        for outgoing in [each for each in self._open if not self._transport.is_reachable(each.addresses[0])]:
            self.give_up(outgoing, "the worker is gone")
        announced = False
        for outgoing in self._open:
            announced |= self._announce_next(outgoing)
        return announced

    def copied(self, outgoing: Outgoing) -> None:
        """The worker needs the blocks no longer."""
        for index in outgoing.push.in_flight:
            outgoing.push.sent(index)
            size_bytes = outgoing.tiles[index].pieces * self._memory.piece_bytes
            outgoing.sent_bytes += size_bytes
            self._sent_bytes.add(MAPPED, size_bytes)
        self._end(outgoing)

    def give_up(self, outgoing: Outgoing, error: str) -> None:
        outgoing.push.fail(error)
        self._end(outgoing)

    def _end(self, outgoing: Outgoing) -> None:
        if outgoing in self._open:
            self._open.remove(outgoing)
            outgoing.ended(outgoing)

    def _announce_next(self, outgoing: Outgoing) -> bool:
        index = outgoing.push.next_segment()
        if index is None:
            return False
        outgoing.push.begin(index)
        tile = outgoing.tiles[index]
        blocks = outgoing.blocks[tile.first_block : tile.first_block + tile.block_count]
        macs = () if outgoing.macs is None else outgoing.macs.macs_of(tile, lambda _: ())
        message = Announcement(
            segment=index,
            size_bytes=tile.pieces * self._memory.piece_bytes,
            transport=MAPPED,
            macs=macs,
            sources=tuple(blocks),
        )
        sealed = seal(Kind.ANNOUNCEMENT, outgoing.secret, message)
        self._mailbox.send(outgoing.addresses[index], outgoing.tag, sealed)
        return True
