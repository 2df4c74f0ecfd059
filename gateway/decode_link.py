"""The one multiplexed stream to a decode worker, through breaks and reattachment."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc

from gateway import wire
from gateway.config import DispatchConfig
from gateway.generation import Generation
from gateway.placement import Placement
from gateway.workers import Target
from mesh.channel import open_channel
from mesh.errors import MeshError, ShuttingDown, WorkerLost
from mesh.failures import from_failure, from_rpc_error
from mesh.metrics import GATEWAY_WORKER_LINKS

AttachCall: TypeAlias = "grpc.aio.StreamStreamCall[decode_pb2.AttachRequest, decode_pb2.AttachResponse]"

_log = logging.getLogger("deepmesh.gateway")
# Times the shortest wait.
_SLOWEST_REATTACH = 10


@dataclass(frozen=True, slots=True)
class GatewayIdentity:
    gateway_id: str
    # Changes at every start.
    incarnation: str


@dataclass(slots=True)
class _Entry:
    """One attempt on this link."""

    attempt: int
    generation: Generation
    placement: Placement
    # Whether the worker was told of it: then a reattachment names it, else it is submitted again.
    sent: bool = False


class DecodeLink:
    """Submits, cancels and acknowledges requests on one incarnation of a worker; hands its tokens to generations.

    A broken stream loses nothing: the link reattaches for as long as the worker's grace lasts and names the next
    position of each request. Requests are lost (they fail with WorkerLost) when that time is over, when another
    incarnation answers, or when the registry drops the worker (`lose`). A link that has nothing to carry when its
    stream breaks closes; `open` tells.
    """

    def __init__(
        self, target: Target, identity: GatewayIdentity, config: DispatchConfig, clock: Callable[[], float]
    ) -> None:
        self.target = target
        self.open = True
        self._identity = identity
        self._config = config
        self._clock = clock
        self._grace_seconds = config.attach_seconds
        self._entries: dict[int, _Entry] = {}
        # What the writer sends next. Submissions outlive a broken stream, the rest means nothing to the next one.
        self._unsent: deque[int] = deque()
        self._cancelled: list[int] = []
        self._ended: list[int] = []
        self._outgoing = asyncio.Event()
        # A context of its own: the request that happens to be the first is not what the link's logs are about.
        self._task = asyncio.create_task(self._run(), name=f"link {target.worker_id}", context=Context())
        self._task.add_done_callback(self._finished)

    @property
    def live_streams(self) -> int:
        return len(self._entries)

    def submit(self, stream_id: int, attempt: int, placement: Placement, generation: Generation) -> None:
        assert self.open
        self._entries[stream_id] = _Entry(attempt, generation, placement)
        self._unsent.append(stream_id)
        self._outgoing.set()

    def cancel(self, stream_id: int) -> None:
        """Stop a request, where it still runs; nothing more of it reaches its generation."""
        entry = self._entries.pop(stream_id, None)
        if entry is not None and entry.sent:
            self._cancelled.append(stream_id)
            self._outgoing.set()

    def lose(self, why: str) -> None:
        """The worker is gone: every request on it fails with WorkerLost, and the link closes."""
        self.open = False
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.generation.fail(WorkerLost(f"worker {self.target.worker_id} is lost: {why}"))
        if entries:
            _log.warning("worker lost", extra={"fields": {"worker": self.target.worker_id, "why": why}})

    def leave(self) -> None:
        """Close the stream; the worker cancels what it still runs for us after its grace."""
        self.open = False
        self._task.cancel()

    async def close(self) -> None:
        """Leave, and wait until the stream is closed."""
        self.leave()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        broken_at, delay = self._clock(), self._config.reattach_seconds
        async with open_channel(self.target.endpoint) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            while self.open:
                if await self._attach(stub, broken_at + self._grace_seconds):
                    broken_at, delay = self._clock(), self._config.reattach_seconds
                if not self._entries:
                    self.open = False
                elif self._clock() + delay > broken_at + self._grace_seconds:
                    self.lose(f"no stream to it for {self._grace_seconds:g} seconds")
                else:
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _SLOWEST_REATTACH * self._config.reattach_seconds)

    async def _attach(self, stub: decode_pb2_grpc.DecodeServiceStub, give_up_at: float) -> bool:
        """Hold one stream for as long as it lasts. False where the worker did not welcome us."""
        call: AttachCall = stub.Attach()
        welcomed = False
        try:
            async with asyncio.timeout_at(give_up_at):
                welcomed = await self._greet(call)
            if welcomed:
                with GATEWAY_WORKER_LINKS.track_inprogress():
                    await self._exchange(call)
        except TimeoutError:
            _log.debug("no welcome in time", extra={"fields": {"worker": self.target.worker_id}})
        except grpc.aio.AioRpcError as error:
            self._explain(from_rpc_error(error), logging.INFO if welcomed else logging.DEBUG)
        finally:
            call.cancel()
        return welcomed

    async def _greet(self, call: AttachCall) -> bool:
        self._cancelled.clear()
        self._ended.clear()
        resume = [
            decode_pb2.ResumePoint(stream_id=stream_id, next_position=entry.generation.next_position)
            for stream_id, entry in self._entries.items()
            if entry.sent
        ]
        await _write(call, decode_pb2.AttachRequest(hello=self._hello(resume)))
        response = await call.read()
        if not isinstance(response, decode_pb2.AttachResponse):
            return False
        identity = response.welcome.identity
        if (identity.worker_id, identity.incarnation) != (self.target.worker_id, self.target.incarnation):
            self.lose(f"{self.target.endpoint} is {identity.worker_id} of another start")
            return False
        self._grace_seconds = response.welcome.grace_ms / 1000
        return True

    def _hello(self, resume: list[decode_pb2.ResumePoint]) -> decode_pb2.AttachHello:
        return decode_pb2.AttachHello(
            gateway_id=self._identity.gateway_id, gateway_incarnation=self._identity.incarnation, resume=resume
        )

    def _explain(self, error: MeshError, level: int) -> None:
        if isinstance(error, ShuttingDown) or error.code is grpc.StatusCode.INVALID_ARGUMENT:
            self.lose(error.message)
        _log.log(level, "stream broke", extra={"fields": {"worker": self.target.worker_id, "why": error.message}})

    async def _exchange(self, call: AttachCall) -> None:
        writer = asyncio.create_task(self._write_all(call))
        try:
            while isinstance(response := await call.read(), decode_pb2.AttachResponse):
                self._dispatch(response.frame)
        finally:
            writer.cancel()
            await asyncio.wait([writer])

    async def _write_all(self, call: AttachCall) -> None:
        self._outgoing.set()
        while await self._outgoing.wait():
            self._outgoing.clear()
            while self._unsent:
                await self._write_submission(call, self._unsent.popleft())
            while self._cancelled:
                cancellation = decode_pb2.Cancellation(stream_id=self._cancelled.pop())
                await _write(call, decode_pb2.AttachRequest(cancellation=cancellation))
            if self._ended:
                ended, self._ended = self._ended, []
                acknowledgement = decode_pb2.Acknowledgement(stream_ids=ended)
                await _write(call, decode_pb2.AttachRequest(acknowledgement=acknowledgement))

    async def _write_submission(self, call: AttachCall, stream_id: int) -> None:
        entry = self._entries.get(stream_id)
        if entry is not None:
            entry.sent = True
            now = self._clock()
            await _write(call, wire.submission(stream_id, entry.attempt, entry.placement, entry.generation, now))

    def _dispatch(self, frame: decode_pb2.StepFrame) -> None:
        entries = self._entries
        for output in frame.outputs:
            entry = entries.get(output.stream_id)
            # Without an entry it was cancelled, or belongs to an attempt that another has replaced.
            if entry is not None:
                entry.generation.receive(
                    output.first_position,
                    output.token_ids,
                    wire.position_logprobs(output.logprobs) if output.logprobs else (),
                    output.cached_tokens if output.HasField("cached_tokens") else None,
                )
            terminal = output.WhichOneof("terminal")
            if terminal is not None:
                self._end(output, entry)

    def _end(self, output: decode_pb2.RequestOutput, entry: _Entry | None) -> None:
        self._entries.pop(output.stream_id, None)
        self._ended.append(output.stream_id)
        self._outgoing.set()
        if entry is None:
            return
        if output.HasField("failure"):
            entry.generation.fail(from_failure(output.failure))
        else:
            entry.generation.finish(wire.finish_reason(output.finished))

    def _finished(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error("link failed", exc_info=task.exception(), extra={"fields": {"worker": self.target.worker_id}})
        self.lose("the gateway left it")


async def _write(call: AttachCall, message: decode_pb2.AttachRequest) -> None:
    # A broken stream tells its reader why.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message)
