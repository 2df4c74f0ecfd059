"""A connection that was idle, and whose state a firewall has dropped: neither end is told."""

import asyncio
from typing import Any

import pytest
from grpc import StatusCode

from mesh.config import ServerConfig
from mesh.errors import MeshError
from mesh.rpc import channel
from mesh.rpc.channel import Channels
from mesh.rpc.keepalive import KEEPALIVE
from mesh.rpc.server import MeshServer
from tests.support.pausing_proxy import proxy_to
from tests.support.raw_service import raw_method, raw_registration
from tests.support.waiting import eventually

FASTER = 4


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def test_a_connection_that_a_firewall_forgot_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/sgl-project/sglang/issues/9266: after a few idle hours, requests through the router fail.

    https://github.com/bazelbuild/bazel/pull/11957: a balancer drops connections silently, and calls hang for 2 hours.
    """
    names = dict(KEEPALIVE)
    faster = tuple((key, each // FASTER if key in names and each > 1 else each) for key, each in channel.OPTIONS)
    monkeypatch.setattr(channel, "OPTIONS", faster)
    async with (
        MeshServer(ServerConfig(drain_seconds=0), "test", [raw_registration(unary_unary=echo)]) as running,
        proxy_to(running.endpoint) as proxy,
        Channels().open(proxy.endpoint) as opened,
    ):
        call = raw_method(opened, "unary_unary")
        assert await call(b"before") == b"before"
        proxy.forget_connections()

        async def answered() -> bool:
            try:
                return bool(await call(b"after", timeout=30) == b"after")
            except MeshError as error:
                # Who calls a service tries again on this code.
                assert error.code is StatusCode.UNAVAILABLE
                return False

        async with asyncio.timeout(60):
            await eventually(answered)
