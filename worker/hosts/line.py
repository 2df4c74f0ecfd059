"""The service's end of the line from its first rank to other hosts (engine.parallel.host_line): carries records
unread.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from engine.parallel.host_line import HEADER


class Line:
    """Made by `open`. `run` reads the rank's records; `write` gives the rank those of other hosts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls) -> tuple["Line", int]:
        """A line, and the descriptor of the rank's end, which the caller must close."""
        ours, theirs = socket.socketpair()
        with theirs:
            return cls(*await asyncio.open_connection(sock=ours)), theirs.detach()

    def write(self, record: bytes) -> None:
        self._writer.write(record)

    async def run(self, on_record: Callable[[bytes], Awaitable[None]]) -> None:
        """Run until the rank closes its end, or dies."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header = await self._reader.readexactly(HEADER.size)
                _, length = HEADER.unpack(header)
                await on_record(header + await self._reader.readexactly(length))

    def close(self) -> None:
        self._writer.close()
