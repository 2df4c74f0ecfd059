"""The service's end of its first rank's line to other hosts (engine.parallel.host_line): records, as they are."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from engine.parallel.host_line import HEADER


class Line:
    """Made by `open`. `run` reads records; `write` gives the rank those of other hosts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls) -> tuple["Line", int]:
        """A line, and the descriptor of the rank's end, which becomes the caller's."""
        ours, theirs = socket.socketpair()
        with theirs:
            return cls(*await asyncio.open_connection(sock=ours)), theirs.detach()

    def write(self, record: bytes) -> None:
        self._writer.write(record)

    async def run(self, on_record: Callable[[bytes], Awaitable[None]]) -> None:
        """Until the rank has closed its end, or died."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header = await self._reader.readexactly(HEADER.size)
                _, length = HEADER.unpack(header)
                await on_record(header + await self._reader.readexactly(length))

    def close(self) -> None:
        self._writer.close()
