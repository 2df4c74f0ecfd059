"""The service's end of the line from its first rank to other hosts (engine.parallel.host_line): carries records
unread.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from engine.parallel.host_line import END, HEADER

_READ_BYTES = 64 * 1024


class Line:
    """Made by `open` or `take`. `run` reads the rank's records; `write` gives the rank those of other hosts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._received = bytearray()
        # Whether the rank has left its present group.
        self._left = False

    @classmethod
    async def open(cls) -> tuple["Line", int]:
        """A line, and the descriptor of the rank's end, which the caller must close."""
        ours, theirs = socket.socketpair()
        with theirs:
            return cls(*await asyncio.open_connection(sock=ours)), theirs.detach()

    @classmethod
    async def take(cls, descriptor: int) -> "Line":
        """The line of a rank that this process's former program had; the descriptor becomes this object's."""
        return cls(*await asyncio.open_connection(sock=socket.socket(fileno=descriptor)))

    def leave(self) -> int:
        """A descriptor for `take`; between two groups of ranks, when nothing is unread."""
        assert not self._received
        return os.dup(self._writer.get_extra_info("socket").fileno())

    def write(self, record: bytes) -> None:
        # A rank that has ended takes no records.
        if not self._writer.is_closing():
            self._writer.write(record)

    def end(self) -> None:
        """Tell the rank that no record follows in its present group: it must leave."""
        self.write(END)

    def renew(self) -> None:
        """The next record is of the rank's next group."""
        self._left = False

    async def run(self, on_record: Callable[[bytes], Awaitable[None]]) -> None:
        """Run until the rank leaves its group, closes its end, or dies; return at once if it has left. If cancelled, it
        may be run again.
        """
        with suppress(ConnectionError):
            while not self._left:
                while (record := self._taken()) is not None:
                    if record == END:
                        self._left = True
                        return
                    await on_record(record)
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    return
                self._received += data

    def close(self) -> None:
        self._writer.close()

    def _taken(self) -> bytes | None:
        """The next record with its header, if it is whole."""
        if len(self._received) < HEADER.size:
            return None
        _, length = HEADER.unpack_from(self._received)
        size = HEADER.size + length
        if len(self._received) < size:
            return None
        record = bytes(self._received[:size])
        del self._received[:size]
        return record
