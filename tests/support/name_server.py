"""A name server with one name, whose address a test changes."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_A, _ANSWERED = 1, 0x8180
_HEADER, _QUESTION_END, _ANSWER = struct.Struct(">6H"), struct.Struct(">2H"), struct.Struct(">3HIH")


class NameServer(asyncio.DatagramProtocol):
    """Made by `name_server`. Answers every question for an IPv4 address; without an `address` there is none."""

    address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.port: int = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, source: tuple[str, int]) -> None:
        number, *_ = _HEADER.unpack_from(data)
        name_end = data.index(b"\0", _HEADER.size) + 1
        kind, _ = _QUESTION_END.unpack_from(data, name_end)
        asked = data[_HEADER.size : name_end + _QUESTION_END.size]
        found = b""
        if kind == _A and self.address is not None:
            # The name is that of the question, right after the header; it may not be kept.
            found = _ANSWER.pack(0xC000 | _HEADER.size, _A, 1, 0, 4) + socket.inet_aton(self.address)
        answer = _HEADER.pack(number, _ANSWERED, 1, int(bool(found)), 0, 0) + asked + found
        self._transport.sendto(answer, source)  # type: ignore[attr-defined]


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()
