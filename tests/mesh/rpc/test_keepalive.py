"""A peer that is connected and answers nothing, as a stopped process: either end gives it up. Times are a quarter.
A client that asks for nothing is given up too.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from mesh.config import ServerConfig
from mesh.rpc import channel, server
from mesh.rpc.channel import Channels
from mesh.rpc.keepalive import CLIENTS_KEEPALIVE, KEEPALIVE
from mesh.rpc.server import MeshServer
from tests.support.pausing_proxy import proxy_to
from tests.support.raw_service import raw_method, raw_registration

FASTER = 4
# A peer is given up after 1.25 to 1.75 s; on a busy machine anything takes longer.
PATIENCE_SECONDS = 30.0


def faster(options: Any) -> tuple[tuple[str, int], ...]:
    names = dict(KEEPALIVE)
    return tuple((key, value // FASTER if key in names and value > 1 else value) for key, value in options)


class Endless:
    """A call that says one thing and then nothing, until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def __call__(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


async def test_a_client_gives_up_a_server_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "OPTIONS", faster(channel.OPTIONS))
    registration = raw_registration(unary_stream=Endless())
    async with (
        MeshServer(ServerConfig(drain_seconds=0), "test", [registration]) as running,
        proxy_to(running.endpoint) as proxy,
        Channels().open(proxy.endpoint) as opened,
    ):
        call = raw_method(opened, "unary_stream")(b"")
        assert await call.read() == b"first"
        proxy.pause()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(call.read(), PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_gives_up_a_client_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEPALIVE", faster(KEEPALIVE))
    handler = Endless()
    async with (
        MeshServer(ServerConfig(drain_seconds=0), "test", [raw_registration(unary_stream=handler)]) as running,
        proxy_to(running.endpoint) as proxy,
        Channels().open(proxy.endpoint) as opened,
    ):
        call = raw_method(opened, "unary_stream")(b"")
        assert await call.read() == b"first"
        proxy.pause()
        await asyncio.wait_for(handler.cancelled.wait(), PATIENCE_SECONDS)
        call.cancel()


async def test_a_forgotten_connection_makes_place_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    quicker = tuple((key, 500 if key.endswith("idle_ms") else value) for key, value in CLIENTS_KEEPALIVE)
    monkeypatch.setattr(server, "CLIENTS_KEEPALIVE", quicker)

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    registration = raw_registration(unary_unary=echo)
    async with (
        MeshServer(ServerConfig(), "test", [registration], public=True, connections=1) as running,
        Channels().open(running.endpoint) as forgotten,
        Channels().open(running.endpoint) as other,
    ):
        assert await raw_method(forgotten, "unary_unary")(b"a", wait_for_ready=True) == b"a"
        # It finds a place once the first is idle.
        assert await raw_method(other, "unary_unary")(b"b", wait_for_ready=True, timeout=PATIENCE_SECONDS) == b"b"
