"""What happens at the edge of every call that a service answers: request ids, errors, metrics, bounds.

All of it runs once a call; streamed messages pass without any code in between.
"""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from mesh.errors import InvalidRequest, MeshError, Overloaded, ShuttingDown, shortened
from mesh.loop_turns import LoopTurns
from mesh.observe.metrics import RPC_HANDLED, RPC_SECONDS, RPC_SHED, RPC_STARTED
from mesh.observe.spans import new_request_id, request_id
from mesh.observe.tracing import TRACEPARENT_KEY, TraceContext, trace_context
from mesh.rpc.failures import STATUS_DETAILS_KEY, to_status
from mesh.rpc.identity import Role, caller, check_role, identity_of

REQUEST_ID_KEY = "x-request-id"
MAX_REQUEST_ID_CHARACTERS = 128
SHED_RETRY_MS = 1000
# How long a stopping server waits for a client that does not read what an endless call has written.
ENDING_SECONDS = 2.0
# Calls that wait for their client's message, and gRPC's own, which wait for news, take no place of other calls, but 20
# KB each. A client without a key can open them, so this many times `max_calls` of either kind (0.65 GB) are the most.
MOST_WAITING = 4
# Prefix of gRPC's own services: health and reflection.
GRPC_OWN = "/grpc."

_log = logging.getLogger("deepmesh.rpc")

Behavior = Callable[[Any, Any], Any]


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Server side, for handlers written with async def (plain, async generators, or writing to the context).

    Calls beyond `max_calls` are refused with Overloaded. MOST_WAITING times as many may wait: calls whose clients have
    not sent the one message, without which gRPC begins no handler, and apart from them gRPC's own (health, reflection).
    `endless` names methods ("/package.Service/Method") whose calls end only with their client: a stopping server first
    waits for all other calls and then ends these with SHUTTING_DOWN. `serves` gives the roles that may call each
    method, if callers have certificates: methods that it does not name are refused, except gRPC's own, which anyone may
    call. None allows all roles.
    """

    def __init__(
        self,
        max_calls: int,
        endless: Collection[str] = (),
        serves: Mapping[str, Collection[Role]] | None = None,
    ) -> None:
        self._max_calls = max_calls
        self._endless = frozenset(endless)
        self._serves = serves
        self._finite_calls: set[asyncio.Task[Any]] = set()
        self._endless_calls: set[asyncio.Task[Any]] = set()
        # Those that are gRPC's own.
        self._own_calls: set[asyncio.Task[Any]] = set()
        # Calls whose one message has not arrived.
        self._silent: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()
        # Calls in the middle of a write. A write must not be cancelled: gRPC could then send the call no status and
        # would keep it open.
        self._writing: set[asyncio.Task[Any]] = set()
        self._turns = LoopTurns()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if not handler.request_streaming and not self._await_message():
            return self._refusing_handler(method)
        metadata = dict(handler_call_details.invocation_metadata or ())
        # The call runs in this context, and so do all tasks that its handler creates.
        request_id.set(_accepted_id(metadata.get(REQUEST_ID_KEY)))
        trace_context.set(TraceContext.parse(metadata.get(TRACEPARENT_KEY)))
        kind = _HANDLERS[handler.request_streaming, handler.response_streaming]
        behavior: Behavior = getattr(handler, kind)
        deserializer = handler.request_deserializer
        if deserializer is not None and handler.request_streaming:
            deserializer = _checking(deserializer)
        elif deserializer is not None:
            behavior, deserializer = _reading(behavior, deserializer), None
        wrapped = self._streaming(method, behavior) if handler.response_streaming else self._unary(method, behavior)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        rewrapped: grpc.RpcMethodHandler[Any, Any] = make(wrapped, deserializer, handler.response_serializer)
        return rewrapped

    async def finish_calls(self, seconds: float) -> bool:
        """Wait up to `seconds` for finite calls, then end the endless ones. Returns whether all finite calls ended."""
        late: set[asyncio.Task[Any]] = set()
        if self._finite_calls:
            _, late = await asyncio.wait(self._finite_calls, timeout=seconds)
        self._ended |= self._endless_calls
        for task in self._endless_calls - self._writing:
            task.cancel()
        if self._endless_calls:
            await asyncio.wait(self._endless_calls, timeout=ENDING_SECONDS)
        return not late

    def _await_message(self) -> bool:
        """Note that the current call waits for its message. False if too many calls do."""
        if len(self._silent) >= MOST_WAITING * self._max_calls:
            return False
        task = asyncio.current_task()
        assert task is not None
        self._silent.add(task)
        task.add_done_callback(self._silent.discard)
        return True

    async def _turn(self, request: object) -> None:
        """Wait, if the request is a large message, until no other such is read in this pass of the event loop."""
        if isinstance(request, bytes):
            await self._turns.next(len(request))

    def _unary(self, method: str, behavior: Behavior) -> Behavior:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with self._edge(method, context):
                self._check_room(method)
                await self._turn(request)
                try:
                    called = behavior(request, context)
                    request = None
                    return await called
                except MeshError as error:
                    request = None
                    _drop_frames(error)
                    raise

        return call

    def _streaming(self, method: str, behavior: Behavior) -> Behavior:
        # This coroutine writes out the handler's generator itself: if it were a generator too, gRPC would run a second
        # loop over the same messages. It also closes the generator, so that its cleanup runs before the call ends.
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with self._edge(method, context):
                self._check_room(method)
                await self._turn(request)
                try:
                    result = behavior(request, context)
                    request = None
                    await (self._write(result, context) if hasattr(result, "__aiter__") else result)
                except MeshError as error:
                    request = None
                    _drop_frames(error)
                    raise

        return call

    async def _write(self, result: AsyncGenerator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        async with aclosing(result) as responses:
            async for response in responses:
                self._writing.add(task)
                await context.write(response)
                self._writing.discard(task)
                if task in self._ended:
                    raise _stopping()

    def _admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Set `caller`. Raises PermissionDenied if the method does not serve the caller's role."""
        if self._serves is None:
            return
        caller.set(identity_of(context.auth_context()))
        if not method.startswith(GRPC_OWN):
            check_role(method, self._serves.get(method, ()))

    def _check_room(self, method: str) -> None:
        """Raises Overloaded if there are too many calls, this one included."""
        if method.startswith(GRPC_OWN):
            full = len(self._own_calls) > MOST_WAITING * self._max_calls
        else:
            full = method not in self._endless and len(self._finite_calls) > self._max_calls
        if full:
            raise self._overloaded(method)

    def _overloaded(self, method: str) -> Overloaded:
        RPC_SHED.labels(method).inc()
        return Overloaded(
            f"this service has {self._max_calls} calls in progress: retry later", retry_after_ms=SHED_RETRY_MS
        )

    def _refusing_handler(self, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with self._edge(method, context):
                raise self._overloaded(method)

        # A handler of a stream begins before any message has arrived.
        return grpc.stream_stream_rpc_method_handler(refuse)

    @asynccontextmanager
    async def _edge(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        RPC_STARTED.labels(method).inc()
        start = time.perf_counter()
        code = StatusCode.OK
        task = asyncio.current_task()
        assert task is not None
        calls = self._endless_calls if method in self._endless else self._finite_calls
        calls.add(task)
        if method.startswith(GRPC_OWN):
            self._own_calls.add(task)
        self._silent.discard(task)
        try:
            self._admit(method, context)
            yield
        except asyncio.CancelledError:
            code = StatusCode.CANCELLED
            if task not in self._ended:
                raise
            code = StatusCode.UNAVAILABLE
            await _abort(context, _stopping())
        except grpc.aio.AbortError:
            code = context.code()
            raise
        except MeshError as error:
            code = error.code
            await _abort(context, error)
        except grpc.aio.InternalError:
            code = StatusCode.CANCELLED
            raise _over() from None
        except Exception:  # noqa: BLE001 - the edge: whatever a handler raises ends here and is logged
            code = StatusCode.INTERNAL
            _log.exception("unexpected error in %s", method)
            await _abort(context, MeshError(f"internal error (request id {request_id.get()})"))
        finally:
            calls.discard(task)
            self._own_calls.discard(task)
            self._ended.discard(task)
            self._writing.discard(task)
            RPC_HANDLED.labels(method, code.name).inc()
            RPC_SECONDS.labels(method).observe(time.perf_counter() - start)


_HANDLERS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


def _checking(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """`deserializer` that raises InvalidRequest for a malformed message."""

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            raise InvalidRequest(f"the message is malformed: {error}") from error

    return deserialize


def _reading(behavior: Behavior, deserializer: Callable[[bytes], Any]) -> Behavior:
    """`behavior` for a message that nothing has read. Of many large ones that arrive at once each is thus gone before
    the next is read: a message takes up to sixty times its bytes.
    """
    read = _checking(deserializer)

    def call(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return behavior(read(data), context)

    return call


def _accepted_id(given: str | bytes | None) -> str:
    """The caller's id if it is short printable text (it is logged), otherwise a new one."""
    if isinstance(given, str) and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS:
        return given
    return new_request_id()


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: MeshError) -> None:
    """End the call with `error`. Raises AbortError, or CancelledError if the client has left already."""
    if context.done():
        raise _over()
    details = ((STATUS_DETAILS_KEY, to_status(error).SerializeToString()),)
    try:
        await context.abort(error.code, shortened(error.message), details)
    except grpc.aio.InternalError:
        raise _over() from None


def _drop_frames(error: BaseException | None) -> None:
    """Let go of the functions that raised `error` and of what they hold, such as the request: gRPC keeps the error of a
    call in a cycle with the call, until Python looks for garbage.
    """
    seen: set[BaseException] = set()
    # An error that is raised from itself is its own cause.
    while error is not None and error not in seen:
        seen.add(error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _stopping() -> ShuttingDown:
    return ShuttingDown("the service is stopping: call again")


def _over() -> asyncio.CancelledError:
    """The exception by which gRPC sees that a call is over: its deadline passed or its client left during a write."""
    return asyncio.CancelledError("the call is over")
