import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc import StatusCode

from mesh.config import ServerConfig
from mesh.errors import ContextExceeded, InvalidRequest, MeshError, Overloaded
from mesh.observe.metrics import RPC_HANDLED
from mesh.observe.spans import request_id
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.interceptors import REQUEST_ID_KEY, EdgeInterceptor
from mesh.rpc.outgoing_calls import request_metadata
from mesh.rpc.server import MeshServer, Registration
from tests.support.metric_values import value_of
from tests.support.raw_service import SERVICE, raw_method, raw_registration
from tests.support.waiting import eventually

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


def serve(**behaviors: Any) -> MeshServer:
    return MeshServer(ServerConfig(), "test", [raw_registration(**behaviors)])


def serve_raw(**handlers: Any) -> MeshServer:
    """A server of whole method handlers, which deserialize."""

    def add(servicer: None, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    return MeshServer(ServerConfig(), "test", [Registration(add, None, SERVICE)])


async def one_message() -> AsyncIterator[bytes]:
    yield b"in"


async def call(channel: grpc.aio.Channel, kind: str, **arguments: Any) -> list[bytes]:
    """One call of any kind with one request message; the responses."""
    request = one_message() if kind.startswith("stream") else b"in"
    made = raw_method(channel, kind)(request, **arguments)
    return [each async for each in made] if kind.endswith("stream") else [await made]


async def error_of(channel: grpc.aio.Channel, kind: str, **arguments: Any) -> MeshError:
    try:
        await call(channel, kind, **arguments)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    except MeshError as error:
        return error
    raise AssertionError("the call should have failed")


def handler(kind: str, error: Exception | None = None, answer: bytes = b"out") -> Any:
    """A handler that reads what comes, answers once, and then raises `error`."""

    async def plain(request: Any, context: Any) -> bytes:
        if error is not None:
            raise error
        return answer

    async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield answer
        if error is not None:
            raise error

    return stream if kind.endswith("stream") else plain


@pytest.mark.parametrize("kind", KINDS)
async def test_a_mesh_error_reaches_the_client_whole(kind: str) -> None:
    error = Overloaded("the mesh is full", metadata={"waiting": "3"}, retry_after_ms=250)
    async with serve(**{kind: handler(kind, error)}) as server, Channels().open(server.endpoint) as channel:
        got = await error_of(channel, kind)
    assert type(got) is Overloaded
    assert (got.message, got.metadata, got.retry_after_ms) == (error.message, error.metadata, 250)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_is_logged_and_hidden_from_the_client(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serve(**{kind: handler(kind, ValueError("a secret"))}) as server,
        Channels().open(server.endpoint) as channel,
    ):
        got = await error_of(channel, kind, metadata=((REQUEST_ID_KEY, "request-7"),))
    assert got.code is StatusCode.INTERNAL
    assert got.message == "internal error (request id request-7)"
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.exc_info is not None and "a secret" in str(record.exc_info[1])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_succeeds_passes_unchanged(kind: str) -> None:
    async with (
        serve(**{kind: handler(kind, answer=b"all good")}) as server,
        Channels().open(server.endpoint) as channel,
    ):
        assert await call(channel, kind) == [b"all good"]


@pytest.mark.parametrize("kind", ["stream_unary", "stream_stream"])
async def test_a_malformed_stream_message_is_refused_without_a_traceback(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def read_all(requests: AsyncIterator[Any], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def echo(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    def parse(data: bytes) -> bytes:
        raise DecodeError("Error parsing message")

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behavior = make(read_all if kind == "stream_unary" else echo, request_deserializer=parse)

    async with serve_raw(**{kind: behavior}) as server, Channels().open(server.endpoint) as channel:
        got = await error_of(channel, kind)
    assert isinstance(got, InvalidRequest)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_large_messages_at_once_are_read_one_by_one() -> None:
    events: list[str] = []

    def read(data: bytes) -> bytes:
        events.append("read")
        return data[:1]

    async def handle(request: bytes, context: Any) -> bytes:
        events.append("handled")
        return request

    behavior: Any = grpc.unary_unary_rpc_method_handler(handle, request_deserializer=read)

    large = b"a" * 100_000
    async with serve_raw(unary_unary=behavior) as server, Channels().open(server.endpoint) as channel:
        answers = await asyncio.gather(*(raw_method(channel, "unary_unary")(large) for _ in range(5)))
    assert (answers, events) == ([b"a"] * 5, ["read", "handled"] * 5)


@pytest.mark.parametrize("malformed", [False, True], ids=["refused", "malformed"])
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_refused_call_leaves_no_request_in_memory(kind: str, malformed: bool) -> None:
    read: list[weakref.ref[Any]] = []

    class Message:
        def __init__(self, data: bytes) -> None:
            read.append(weakref.ref(self))
            if malformed:
                raise DecodeError

    async def handle(request: Message, context: Any) -> bytes:
        error = InvalidRequest("never", field=str(request))
        # As where a field gets its client's name.
        raise error from error

    behavior = getattr(grpc, f"{kind}_rpc_method_handler")(handle, request_deserializer=Message)
    async with serve_raw(**{kind: behavior}) as server, Channels().open(server.endpoint) as channel:
        gc.disable()
        try:
            assert isinstance(await error_of(channel, kind), InvalidRequest)
            await eventually(lambda: read[0]() is None)
        finally:
            gc.enable()


class LeavingClient:
    """The context of a call that ends while its error is being written."""

    def done(self) -> bool:
        return False

    async def abort(self, *arguments: Any) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")


async def test_a_client_that_leaves_during_its_error_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        raise Overloaded("full")

    call = EdgeInterceptor(max_calls=10)._unary("/test/method", refuse)
    # gRPC ends a call that raises this without a word.
    with pytest.raises(asyncio.CancelledError):
        await call(b"", LeavingClient())
    assert not caplog.records


async def test_messages_sent_before_an_error_still_arrive() -> None:
    async with (
        serve(unary_stream=handler("unary_stream", ContextExceeded("too long"), b"first")) as server,
        Channels().open(server.endpoint) as channel,
    ):
        stream = raw_method(channel, "unary_stream")(b"")
        assert await stream.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.read()
    assert isinstance(from_rpc_error(raised.value), ContextExceeded)


async def test_a_handler_may_write_to_its_context() -> None:
    async def write_twice(request: bytes, context: Any) -> None:
        await context.write(b"1")
        await context.write(b"2")

    async with serve(unary_stream=write_twice) as server, Channels().open(server.endpoint) as channel:
        assert await call(channel, "unary_stream") == [b"1", b"2"]


async def tell_request_id(request: bytes, context: Any) -> bytes:
    return (request_id.get() or "none").encode()


async def test_a_client_request_id_is_the_handlers() -> None:
    async with serve(unary_unary=tell_request_id) as server, Channels().open(server.endpoint) as channel:
        assert await call(channel, "unary_unary", metadata=((REQUEST_ID_KEY, "mine"),)) == [b"mine"]


async def test_the_current_request_id_travels_with_unary_calls() -> None:
    async with serve(unary_unary=tell_request_id) as server, Channels().open(server.endpoint) as channel:
        request_id.set("from-upstream")
        assert await call(channel, "unary_unary") == [b"from-upstream"]


async def test_a_stream_carries_the_current_request_id() -> None:
    async def tell(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield await tell_request_id(request, context)

    async with serve(unary_stream=tell) as server, Channels().open(server.endpoint) as channel:
        request_id.set("streamed")
        assert await call(channel, "unary_stream", metadata=request_metadata()) == [b"streamed"]


async def test_calls_without_a_request_id_get_one_each() -> None:
    async with serve(unary_unary=tell_request_id) as server, Channels().open(server.endpoint) as channel:
        first, second = await call(channel, "unary_unary"), await call(channel, "unary_unary")
    assert first != second and b"none" not in (*first, *second)


async def test_an_overlong_request_id_is_replaced() -> None:
    async with serve(unary_unary=tell_request_id) as server, Channels().open(server.endpoint) as channel:
        [got] = await call(channel, "unary_unary", metadata=((REQUEST_ID_KEY, "x" * 1000),))
    assert 0 < len(got) < 100


async def test_a_cancelled_stream_runs_its_handlers_cleanup() -> None:
    cleaned = asyncio.Event()

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"tick"
                await asyncio.sleep(0.01)
        finally:
            cleaned.set()

    async with serve(unary_stream=endless) as server, Channels().open(server.endpoint) as channel:
        stream = raw_method(channel, "unary_stream")(b"")
        await stream.read()
        stream.cancel()
        await asyncio.wait_for(cleaned.wait(), 20)


async def test_a_passed_deadline_raises_deadline_exceeded_and_cancels_the_handler() -> None:
    cancelled = asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return b""

    async with serve(unary_unary=slow) as server, Channels().open(server.endpoint) as channel:
        got = await error_of(channel, "unary_unary", timeout=0.05)
        await asyncio.wait_for(cancelled.wait(), 20)
    assert got.code is StatusCode.DEADLINE_EXCEEDED


async def test_calls_are_counted_by_how_they_ended() -> None:
    counter = RPC_HANDLED.labels(f"/{SERVICE}/unary_unary", "RESOURCE_EXHAUSTED")
    before = value_of(counter)
    async with (
        serve(unary_unary=handler("unary_unary", Overloaded("full"))) as server,
        Channels().open(server.endpoint) as channel,
    ):
        await error_of(channel, "unary_unary")
    assert value_of(counter) == before + 1


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with Channels().open("127.0.0.1:1") as channel:
        assert (await error_of(channel, "unary_unary")).code is StatusCode.UNAVAILABLE
