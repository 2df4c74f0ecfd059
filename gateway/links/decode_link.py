"""The one multiplexed stream to a decode worker, through breaks and reattachment."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, TypeAlias

import grpc
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc

from gateway.config import DispatchConfig
from gateway.generation import Generation
from gateway.links import wire
from gateway.links.outbox import Outbox
from mesh.domain import wire as domain_wire
from mesh.domain.outputs import CachedTokens
from mesh.domain.placement import Placement
from mesh.domain.targets import WorkerTarget
from mesh.errors import InvalidRequest, LeaseConflict, MeshError, Retry, ShuttingDown, WorkerLost
from mesh.observe.metrics import GATEWAY_WORKER_LINKS
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_failure, from_rpc_error
from mesh.rpc.identity import Role

AttachCall: TypeAlias = "grpc.aio.StreamStreamCall[decode_pb2.AttachRequest, decode_pb2.AttachResponse]"

_log = logging.getLogger("deepmesh.gateway")
# The pause before a reattachment grows up to this many times the shortest one.
_SLOWEST_REATTACH = 10


@dataclass(frozen=True, slots=True)
class GatewayIdentity:
    gateway_id: str
    # Random; another one at every start.
    incarnation: str


class LinkState(Enum):
    """A link alternates between CONNECTING and ATTACHED, and ends in CLOSED."""

    # No stream is up; submissions wait for the next one.
    CONNECTING = "connecting"
    # The worker has welcomed the stream.
    ATTACHED = "attached"
    # Final: the link takes no submission, and all of its requests have failed.
    CLOSED = "closed"


@dataclass(slots=True)
class _Request:
    """One attempt of a generation on this link."""

    attempt: int
    generation: Generation
    placement: Placement
    # Whether the worker may know the request. If so, a reattachment names it; otherwise the next stream submits it.
    sent: bool = False


class DecodeLink:
    """Submits, cancels and acknowledges requests on one incarnation of a worker; hands its tokens to generations.

    A broken stream loses nothing: the link reattaches for as long as the worker's grace lasts, and tells it the next
    position that it expects of each request. Requests are lost (they fail with WorkerLost) if the grace ends, if
    another incarnation answers, or if the registry drops the worker (`lose`). A refused stream does not prove that the
    worker is dead, since a proxy may refuse for a live one, but its requests may then move elsewhere. A link without
    requests closes if its stream breaks. A request that cannot be encoded fails alone.
    """

    def __init__(
        self,
        target: WorkerTarget,
        identity: GatewayIdentity,
        config: DispatchConfig,
        channels: Channels,
        clock: Callable[[], float],
    ) -> None:
        self.target = target
        self.state = LinkState.CONNECTING
        self._identity = identity
        self._config = config
        self._channels = channels
        self._clock = clock
        self._grace_seconds = config.attach_seconds
        self._requests: dict[int, _Request] = {}
        self._outbox = Outbox()
        # The task gets an empty context: otherwise all its logs would carry the id of the link's first request.
        self._task = asyncio.create_task(self._run(), name=f"link {target.worker_id}", context=Context())
        self._task.add_done_callback(self._finished)

    @property
    def open(self) -> bool:
        """Whether the link takes submissions."""
        return self.state is not LinkState.CLOSED

    @property
    def live_streams(self) -> int:
        return len(self._requests)

    def submit(self, stream_id: int, attempt: int, placement: Placement, generation: Generation) -> None:
        assert self.open
        self._requests[stream_id] = _Request(attempt, generation, placement)
        self._outbox.submit(stream_id)

    def cancel(self, stream_id: int) -> None:
        """Stop a request if it still runs; its generation receives no more tokens."""
        request = self._requests.pop(stream_id, None)
        if request is not None and request.sent:
            self._outbox.cancel(stream_id)

    def lose(self, why: str) -> None:
        """The worker is gone: every request on it fails with WorkerLost, and the link closes."""
        self._enter(LinkState.CLOSED)
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.generation.fail(WorkerLost(f"worker {self.target.worker_id} is lost: {why}"))
        if requests:
            _log.warning("worker lost", extra={"fields": {"worker": self.target.worker_id, "why": why}})

    def leave(self) -> None:
        """Close the stream. After its grace the worker cancels the requests that it still runs for this gateway."""
        self._enter(LinkState.CLOSED)
        self._task.cancel()

    async def close(self) -> None:
        """Leave, and wait until the stream is closed."""
        self.leave()
        await asyncio.wait([self._task])

    def _enter(self, state: LinkState) -> None:
        """Change the state; all changes go through here. CLOSED is final, whatever the stream still does."""
        if self.state is LinkState.CLOSED:
            return
        GATEWAY_WORKER_LINKS.inc((state is LinkState.ATTACHED) - (self.state is LinkState.ATTACHED))
        self.state = state

    async def _run(self) -> None:
        broken_at, delay = self._clock(), self._config.reattach_seconds
        async with self._channels.open(self.target.endpoint, Role.DECODE) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            while self.open:
                if await self._attach(stub, broken_at + self._grace_seconds):
                    broken_at, delay = self._clock(), self._config.reattach_seconds
                if not self._requests:
                    self._enter(LinkState.CLOSED)
                elif self._clock() + delay > broken_at + self._grace_seconds:
                    self.lose(f"no stream to it for {self._grace_seconds:g} seconds")
                else:
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _SLOWEST_REATTACH * self._config.reattach_seconds)

    async def _attach(self, stub: decode_pb2_grpc.DecodeServiceStub, give_up_at: float) -> bool:
        """Open one stream and serve it until it breaks. False if the worker did not welcome it."""
        call: AttachCall = stub.Attach()
        try:
            async with asyncio.timeout_at(give_up_at):
                welcomed = await self._greet(call)
            if welcomed:
                self._enter(LinkState.ATTACHED)
                await self._exchange(call)
            return welcomed
        except TimeoutError:
            _log.debug("no welcome in time", extra={"fields": {"worker": self.target.worker_id}})
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error)
            self._explain(refusal, logging.DEBUG)
            if refusal.retry is Retry.THIS_CALL:
                self._doubt()
        finally:
            call.cancel()
            self._enter(LinkState.CONNECTING)
        return False

    async def _greet(self, call: AttachCall) -> bool:
        self._outbox.reattach()
        resume = [
            decode_pb2.ResumePoint(stream_id=stream_id, next_position=request.generation.next_position)
            for stream_id, request in self._requests.items()
            if request.sent
        ]
        hello = decode_pb2.AttachHello(
            gateway_id=self._identity.gateway_id, gateway_incarnation=self._identity.incarnation, resume=resume
        )
        await call.write(decode_pb2.AttachRequest(hello=hello))
        response = await call.read()
        if not isinstance(response, decode_pb2.AttachResponse):
            return False
        identity = response.welcome.identity
        if (identity.worker_id, identity.incarnation) != (self.target.worker_id, self.target.incarnation):
            self.lose(f"{self.target.endpoint} is {identity.worker_id} of another start")
            return False
        self._grace_seconds = response.welcome.grace_ms / 1000
        return True

    async def _exchange(self, call: AttachCall) -> None:
        """Read and write until the stream ends. Any error that is not a broken stream ends the link."""
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(self._write_all(call))
            await self._read_all(call)
            writer.cancel()

    async def _read_all(self, call: AttachCall) -> None:
        try:
            # gRPC returns None for a message that it cannot parse.
            while isinstance(response := await call.read(), decode_pb2.AttachResponse):
                self._dispatch(response.frame)
        except grpc.aio.AioRpcError as error:
            self._explain(from_rpc_error(error), logging.INFO)

    def _doubt(self) -> None:
        """The worker's address refuses the stream: let requests move to other workers. Those that find none stay."""
        for request in self._requests.values():
            request.generation.doubt()

    def _explain(self, error: MeshError, level: int) -> None:
        # These two errors would repeat on the next stream; any other may have been the connection's fault.
        if isinstance(error, ShuttingDown | InvalidRequest):
            self.lose(error.message)
        level = logging.WARNING if isinstance(error, LeaseConflict) else level
        _log.log(level, "stream broke", extra={"fields": {"worker": self.target.worker_id, "why": error.message}})

    async def _write_all(self, call: AttachCall) -> None:
        # The writer ignores a broken stream: the reader gets the reason and ends the exchange.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._write_until_broken(call)

    async def _write_until_broken(self, call: AttachCall) -> NoReturn:
        outbox = self._outbox
        while True:
            await outbox.filled()
            while (submitted := outbox.pop_submission()) is not None:
                await self._write_submission(call, submitted)
            while (cancelled := outbox.pop_cancellation()) is not None:
                cancellation = decode_pb2.Cancellation(stream_id=cancelled)
                await call.write(decode_pb2.AttachRequest(cancellation=cancellation))
            if ended := outbox.pop_acknowledgements():
                acknowledgement = decode_pb2.Acknowledgement(stream_ids=ended)
                await call.write(decode_pb2.AttachRequest(acknowledgement=acknowledgement))

    async def _write_submission(self, call: AttachCall, stream_id: int) -> None:
        request = self._requests.get(stream_id)
        # None if it was cancelled before it was sent.
        if request is not None and (message := self._encode(stream_id, request)) is not None:
            request.sent = True
            await call.write(message)

    def _encode(self, stream_id: int, request: _Request) -> decode_pb2.AttachRequest | None:
        """The submission. If it cannot be encoded, fail this request alone and return None."""
        try:
            return wire.submission(stream_id, request.attempt, request.placement, request.generation, self._clock())
        # Protobuf raises these for a value that its field cannot hold.
        except (TypeError, ValueError) as error:
            _log.error("a request cannot be encoded", exc_info=error)
            del self._requests[stream_id]
            request.generation.fail(MeshError("internal error: the request cannot be encoded for its worker"))
            return None

    def _dispatch(self, frame: decode_pb2.StepFrame) -> None:
        # This runs for every token of every client: create no object here that most tokens do not need.
        for output in frame.outputs:
            request = self._requests.get(output.stream_id)
            # None if the request was cancelled or another attempt replaced it.
            if request is not None:
                logprobs = output.logprobs
                if request.generation.awaits_prompt and output.HasField("prompt_logprobs"):
                    request.generation.receive_prompt(domain_wire.prompt_logprobs(output.prompt_logprobs))
                request.generation.receive(
                    output.first_position,
                    output.token_ids,
                    [domain_wire.logprobs(each) for each in logprobs] if logprobs else (),
                    _cached(output) if output.HasField("cached_tokens") else None,
                    output.relaxed,
                )
            if output.WhichOneof("terminal") is not None:
                self._end(output, request)

    def _end(self, output: decode_pb2.RequestOutput, request: _Request | None) -> None:
        self._requests.pop(output.stream_id, None)
        self._outbox.acknowledge(output.stream_id)
        if request is None:
            return
        if output.HasField("failure"):
            request.generation.fail(from_failure(output.failure))
        else:
            request.generation.finish(domain_wire.finish_reason(output.finished))

    def _finished(self, task: asyncio.Task[None]) -> None:
        """Fail every request when the link's task ends, for whatever reason: none may wait for it any longer."""
        failed = not task.cancelled() and task.exception() is not None
        if failed:
            _log.error("link failed", exc_info=task.exception(), extra={"fields": {"worker": self.target.worker_id}})
        self.lose("its link failed" if failed else "the gateway left it")


def _cached(output: decode_pb2.RequestOutput) -> CachedTokens:
    return CachedTokens(output.cached_tokens, output.host_cached_tokens, output.store_cached_tokens)
