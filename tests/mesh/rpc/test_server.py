import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mesh.addresses import callable_host, with_port
from mesh.config import ServerConfig
from mesh.errors import ConfigError, MeshError, Overloaded, ShuttingDown
from mesh.observe.metrics import RPC_SHED
from mesh.rpc import interceptors
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.server import MeshServer
from tests.support.ipv6 import needs_ipv6
from tests.support.metric_values import value_of
from tests.support.raw_service import SERVICE, raw_method, raw_registration
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[3]
STOPPING_SERVERS = ROOT / "tests" / "support" / "stopping_servers.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, service: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def all_health(channel: grpc.aio.Channel) -> list[int]:
    return [await health(channel, service) for service in ("liveness", "readiness", "")]


async def test_readiness_follows_ready_and_drain_while_liveness_stays() -> None:
    async with MeshServer(ServerConfig(), "test", []) as server, Channels().open(server.endpoint) as channel:
        assert await all_health(channel) == [SERVING, NOT_SERVING, NOT_SERVING]
        await server.ready()
        assert await all_health(channel) == [SERVING, SERVING, SERVING]
        await server.drain()
        assert await all_health(channel) == [SERVING, NOT_SERVING, NOT_SERVING]


async def test_connections_beyond_the_limit_are_closed_at_once() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(MeshServer(ServerConfig(), "test", [], connections=1))
        # Channels to one address share a connection unless they are told not to.
        alone = [("grpc.use_local_subchannel_pool", 1)]
        first, second = (grpc.aio.insecure_channel(server.endpoint, options=alone) for _ in range(2))
        await stack.enter_async_context(first)
        await stack.enter_async_context(second)
        assert await health(first, "liveness") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health(second, "liveness")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await health(first, "liveness") == SERVING


async def test_reflection_lists_every_service() -> None:
    server = MeshServer(ServerConfig(), "test", [raw_registration()])
    async with server, Channels().open(server.endpoint) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        call.cancel()
    names = {each.name for each in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} == names


async def test_a_taken_port_is_a_config_error_that_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"scheduler cannot listen on 127.0.0.1:{port} \(address already in use\)"
        ):
            async with MeshServer(ServerConfig(port=port), "scheduler", []):
                pass
    # Nor does gRPC print a line of its own.
    assert capfd.readouterr().err == ""


async def test_two_servers_never_share_a_port() -> None:
    async with MeshServer(ServerConfig(), "first", []) as first:
        with pytest.raises(ConfigError):
            async with MeshServer(ServerConfig(port=first.port), "second", []):
                pass


async def test_a_foreign_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        async with MeshServer(ServerConfig(host="192.0.2.1"), "test", []):
            pass


async def test_a_taken_metrics_port_is_named_in_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            async with MeshServer(ServerConfig(metrics_port=port), "test", []):
                pass


async def test_metrics_are_served_where_a_port_is_set() -> None:
    async with MeshServer(ServerConfig(metrics_port=0), "test", []) as server, httpx.AsyncClient(timeout=60) as client:
        response = await client.get(f"http://127.0.0.1:{server.metrics_port}/metrics")
    assert "deepmesh_rpc_started_total" in response.text


async def test_a_message_over_the_limit_is_refused() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = MeshServer(ServerConfig(max_message_bytes=2000), "test", [raw_registration(unary_unary=echo)])
    async with server, Channels().open(server.endpoint) as channel:
        assert await raw_method(channel, "unary_unary")(b"x" * 1000) == b"x" * 1000
        with pytest.raises(MeshError) as raised:
            await raw_method(channel, "unary_unary")(b"x" * 3000)
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_bursts_calls_are_answered_or_told_when_to_retry() -> None:
    room = asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        await room.wait()
        return b"done"

    async def answer_of(channel: grpc.aio.Channel) -> bytes | MeshError:
        try:
            return bytes(await raw_method(channel, "unary_unary")(b""))
        except MeshError as error:
            return error

    before = value_of(RPC_SHED.labels(f"/{SERVICE}/unary_unary"))
    server = MeshServer(ServerConfig(max_calls=100), "test", [raw_registration(unary_unary=slow)])
    async with server, Channels().open(server.endpoint) as channel:
        calls = [asyncio.create_task(answer_of(channel)) for _ in range(1200)]
        await eventually(lambda: sum(call.done() for call in calls) == 1100)
        assert await health(channel, "liveness") == SERVING
        room.set()
        answers = await asyncio.gather(*calls)
    shed = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert (answers.count(b"done"), len(shed)) == (100, 1100)
    assert {error.retry_after_ms for error in shed} == {1000}
    assert value_of(RPC_SHED.labels(f"/{SERVICE}/unary_unary")) == before + 1100


async def answers(channel: grpc.aio.Channel, message: bytes) -> bool:
    try:
        return bool(await raw_method(channel, "unary_unary")(message) == message)
    except Overloaded:
        return False


async def test_calls_without_a_message_are_bounded() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = MeshServer(ServerConfig(max_calls=1), "test", [raw_registration(unary_unary=echo)])
    async with server, Channels().open(server.endpoint) as channel:
        silent: list[Any] = [channel.stream_unary(f"/{SERVICE}/unary_unary")() for _ in range(5)]
        first, _ = await asyncio.wait(
            [asyncio.create_task(call.code()) for call in silent], return_when=asyncio.FIRST_COMPLETED
        )
        assert [task.result() for task in first] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        for call in silent:
            call.cancel()
        await eventually(lambda: answers(channel, b"now"))


async def test_watchers_of_health_are_bounded() -> None:
    async with MeshServer(ServerConfig(max_calls=1), "test", []) as server, Channels().open(server.endpoint) as channel:
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="liveness")
        watching = [stub.Watch(request) for _ in range(4)]
        assert [(await call.read()).status for call in watching] == [SERVING] * 4
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(request).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in watching:
            call.cancel()


def http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


async def test_streams_that_are_reset_at_once_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.rpc.server.MAX_STREAMS", 100)
    # POST, http, and a path.
    fields = b"\x83\x86\x04\x02/x\x01\x01y\x00\x0ccontent-type\x10application/grpc"
    header, settings, reset = 0x1, 0x4, 0x3
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(settings, 0, 0)
    for stream in range(1, 1001, 2):
        sent += http2_frame(header, 0x4, stream, fields) + http2_frame(reset, 0, stream, struct.pack(">I", 8))
    async with MeshServer(ServerConfig(), "test", []) as server:
        # The event loop stands still meanwhile, so that no call begins.
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(sent)
            answer, refused = b"", [http2_frame(reset, 0, stream, bytes(4))[:-4] for stream in range(201, 1001, 2)]
            while refused[-1] not in answer:
                answer += client.recv(65536)
        assert all(frame in answer for frame in refused)
        async with Channels().open(server.endpoint) as channel:
            assert await health(channel, "liveness") == SERVING


@pytest.mark.check("late")
async def test_calls_that_waited_for_over_half_a_minute_are_answered() -> None:
    async def slow(request: bytes, context: Any) -> bytes:
        if request == b"first":
            # The others wait within gRPC, of which one thread goes on.
            time.sleep(32)  # noqa: ASYNC251 - the whole loop is to stand still
        return request

    server = MeshServer(ServerConfig(), "test", [raw_registration(unary_unary=slow)])
    async with server, Channels().open(server.endpoint) as channel:
        method = raw_method(channel, "unary_unary")
        answers = await asyncio.gather(method(b"first"), *(method(b"other") for _ in range(20)))
    assert answers == [b"first", *[b"other"] * 20]


async def test_a_stopping_server_lets_calls_end() -> None:
    started = asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        started.set()
        await asyncio.sleep(0.2)
        return b"done"

    server = MeshServer(ServerConfig(), "test", [raw_registration(unary_unary=slow)])
    async with open_channel_to(server) as channel:
        call = asyncio.ensure_future(raw_method(channel, "unary_unary")(b""))
        await started.wait()
        await server.__aexit__(None, None, None)
        assert await call == b"done"


async def test_a_stopping_server_waits_no_longer_than_it_was_told() -> None:
    started = asyncio.Event()

    async def forever(request: bytes, context: Any) -> bytes:
        started.set()
        await asyncio.sleep(60)
        return b""

    server = MeshServer(ServerConfig(drain_seconds=0.1), "test", [raw_registration(unary_unary=forever)])
    async with open_channel_to(server) as channel:
        call = asyncio.ensure_future(raw_method(channel, "unary_unary")(b""))
        await started.wait()
        await asyncio.wait_for(server.__aexit__(None, None, None), 20)
        with pytest.raises((MeshError, asyncio.CancelledError)):
            await call


async def test_a_stopping_server_ends_endless_calls_as_shutting_down() -> None:
    async def watch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"now"
        await asyncio.sleep(60)

    registration = raw_registration(("unary_stream",), unary_stream=watch)
    server = MeshServer(ServerConfig(drain_seconds=30), "test", [registration])
    async with open_channel_to(server) as channel:
        call = raw_method(channel, "unary_stream")(b"")
        assert await call.read() == b"now"
        await asyncio.wait_for(server.__aexit__(None, None, None), 20)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert isinstance(from_rpc_error(raised.value), ShuttingDown)


@asynccontextmanager
async def call_in_the_middle_of_a_write(message: bytes) -> AsyncIterator[tuple[MeshServer, Any]]:
    """A server and an endless call of it, whose message waits until the client reads."""
    writes = asyncio.Event()

    async def watch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        writes.set()
        yield message
        await asyncio.sleep(60)

    registration = raw_registration(("unary_stream",), unary_stream=watch)
    server = MeshServer(ServerConfig(drain_seconds=30), "test", [registration])
    async with open_channel_to(server) as channel:
        call = raw_method(channel, "unary_stream")(b"")
        await writes.wait()
        yield server, call


async def test_a_stopping_server_lets_an_endless_call_end_its_write() -> None:
    message = bytes(1_000_000)
    async with call_in_the_middle_of_a_write(message) as (server, call):
        stopping = asyncio.create_task(server.__aexit__(None, None, None))
        assert await call.read() == message
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        await asyncio.wait_for(stopping, 20)
    assert isinstance(from_rpc_error(raised.value), ShuttingDown)


async def test_a_client_that_does_not_read_holds_no_stopping_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "ENDING_SECONDS", 0.1)
    async with call_in_the_middle_of_a_write(bytes(1_000_000)) as (server, _):
        await asyncio.wait_for(server.__aexit__(None, None, None), 20)


def test_a_server_stops_whenever_its_last_call_ends() -> None:
    # In a process of its own: gRPC crashed it in every second run.
    stopping = subprocess.run(
        [sys.executable, str(STOPPING_SERVERS), "250"], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    assert stopping.returncode == 0, stopping.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_wait(number: signal.Signals) -> None:
    async with MeshServer(ServerConfig(), "test", []) as server:
        before = signal.getsignal(number)
        waiting = asyncio.create_task(server.until_signal())
        await asyncio.sleep(0)
        try:
            os.kill(os.getpid(), number)
            await asyncio.wait_for(waiting, 20)
        finally:
            signal.signal(number, before)


class open_channel_to:
    """Starts `server` (the test stops it) and opens a channel to it."""

    def __init__(self, server: MeshServer) -> None:
        self._server = server

    async def __aenter__(self) -> grpc.aio.Channel:
        await self._server.__aenter__()
        self._channel = Channels().open(self._server.endpoint)
        return self._channel

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "127.0.0.1", *(pytest.param(host, marks=needs_ipv6) for host in ("::", "[::1]"))]
)
async def test_a_server_tells_others_an_address_that_they_can_call(host: str) -> None:
    async with MeshServer(ServerConfig(host=host, metrics_port=0), "test", []) as server:
        named = socket.gethostname() if host in ("0.0.0.0", "::") else host
        assert server.endpoint == f"{named}:{server.port}"
        here = with_port(callable_host(host.strip("[]")), server.port)
        async with Channels().open(here) as channel:
            await channel.channel_ready()
        async with httpx.AsyncClient() as client:
            url = f"http://{with_port(callable_host(host.strip('[]')), server.metrics_port or 0)}/metrics"
            assert (await client.get(url)).status_code == 200
