"""Requests that ask to change their connection's protocol are answered as others are."""

import asyncio
import json

import pytest

from tests.support.gateways import Mesh, direct, running_mesh
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = direct
BODY = json.dumps({"prompt": "Hi"}).encode()
# With the beginning of sequence.
TOKENS = 3
UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n",
    "websocket": b"Connection: keep-alive, upgrade\r\nupgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
WHOLE = b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)


def request(upgrade: str = "h2c", body: bytes = WHOLE) -> bytes:
    return b"POST /tokenize HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n" + UPGRADES[upgrade] + body


async def answers(mesh: Mesh, *pieces: bytes, count: int = 1) -> list[tuple[bytes, object]]:
    """Status and body of this many answers on one connection; each piece arrives by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
    found = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            # The server's task runs between two of ours.
            await asyncio.sleep(0)
        for _ in range(count):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            found.append((head[9:12], json.loads(await reader.readexactly(length))["count"]))
    writer.close()
    return found


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        ([request()], 1),
        ([request("websocket")], 1),
        ([request(body=CHUNKED)], 1),
        ([request()[:70], request()[70:-4], request()[-4:]], 1),
        ([bytes([byte]) for byte in request()], 1),
        ([request() * 3], 3),
        ([request(), request("websocket")], 2),
    ],
    ids=["h2c", "websocket", "chunked", "in three pieces", "byte by byte", "pipelined", "one after the other"],
)
async def test_a_wish_for_another_protocol_is_ignored(pieces: list[bytes], count: int) -> None:
    async with running_mesh() as mesh:
        assert await answers(mesh, *pieces, count=count) == [(b"200", TOKENS)] * count


async def test_no_protocol_is_changed_for_a_request_without_body() -> None:
    async with running_mesh() as mesh:
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + UPGRADES["websocket"] + b"\r\n")
        assert await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
