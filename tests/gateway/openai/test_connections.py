"""Connections that ask for nothing, or slowly, or that are too many."""

import asyncio
from typing import Any

from gateway.config import HttpConfig
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import Mesh, direct, running_mesh
from tests.support.waiting import PATIENCE_SECONDS

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
pytestmark = direct
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def connect(mesh: Mesh, sent: bytes = b"") -> Pair:
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def closed(connection: Pair) -> bytes:
    """What the server sent before it closed the connection."""
    reader, writer = connection
    rest = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    return rest


async def answered(connection: Pair) -> bytes:
    reader, _ = connection
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(length)
    return head


async def test_a_connection_that_sends_no_or_half_a_request_is_closed() -> None:
    async with running_mesh(http=HttpConfig(header_seconds=0.2)) as mesh:
        silent, half = await connect(mesh), await connect(mesh, HEALTH[:-2])
        assert [await closed(silent), await closed(half)] == [b"", b""]


async def test_half_a_request_after_a_whole_one_is_not_waited_for_either() -> None:
    async with running_mesh(http=HttpConfig(header_seconds=0.2)) as mesh:
        connection = await connect(mesh, HEALTH)
        await answered(connection)
        await asyncio.sleep(0.3)
        connection[1].write(HEALTH)
        await answered(connection)
        connection[1].write(HEALTH[:-2])
        assert await closed(connection) == b""


async def test_an_idle_connection_is_closed() -> None:
    async with running_mesh(http=HttpConfig(keep_alive_seconds=1)) as mesh:
        connection = await connect(mesh, HEALTH)
        await answered(connection)
        assert await closed(connection) == b""


async def test_idle_connections_give_way_to_new_ones() -> None:
    async with running_mesh(http=HttpConfig(connections=5)) as mesh:
        idle = [await connect(mesh) for _ in range(20)]
        assert (await mesh.http.get("/health")).status_code == 200
        for connection in idle[:15]:
            assert await closed(connection) == b""
        for _, writer in idle[15:]:
            writer.close()


async def test_a_connection_beyond_the_limit_is_told_to_come_again_while_all_are_busy() -> None:
    body: Any = {"model": "oracle", "prompt": "abc", "max_tokens": 2000, "stream": True}
    worker = FakeDecodeWorker(step_seconds=0.01)
    async with (
        running_mesh(worker, http=HttpConfig(connections=1)) as mesh,
        mesh.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        refused = await closed(await connect(mesh))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        assert await anext(response.aiter_lines())
