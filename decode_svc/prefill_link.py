"""Calls to prefill workers, over one channel to each."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from deepmesh.internal.v1 import prefill_pb2_grpc

from decode_svc import wire
from engine.protocol.messages import LandingOpened, Output
from mesh.domain.requests import Submission
from mesh.domain.targets import WorkerTarget
from mesh.errors import InvalidRequest
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role
from mesh.rpc.outgoing_calls import request_metadata

# Most idle channels that are kept: over time many workers disappear for good.
MAX_IDLE_CHANNELS = 64


@dataclass(slots=True)
class _Channel:
    channel: grpc.aio.Channel
    calls: int = 0


class Registered(Protocol):
    """The prefill workers that exist."""

    async def check(self, target: WorkerTarget) -> None:
        """Raises PermissionDenied if the target is not one of them."""
        ...

    def knows(self, target: WorkerTarget) -> bool: ...


class PrefillLink:
    def __init__(self, channels: Channels, registered: Registered) -> None:
        self._open = channels.open
        self._registered = registered
        # By endpoint, the least recently used first.
        self._channels: OrderedDict[str, _Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def open_channels(self) -> int:
        return len(self._channels)

    def knows(self, target: WorkerTarget) -> bool:
        """See `decode_svc.prefills.PrefillCalls`."""
        return self._registered.knows(target)

    async def close(self) -> None:
        """End every call."""
        channels, self._channels = self._channels, OrderedDict()
        await asyncio.gather(*(kept.channel.close() for kept in channels.values()), *self._closing)

    async def call(
        self, target: WorkerTarget, submission: Submission, opened: LandingOpened
    ) -> AsyncGenerator[Output, None]:
        """See `decode_svc.prefills.PrefillCalls`."""
        await self._registered.check(target)
        request, position = wire.prefill_request(submission, opened), len(submission.request.token_ids)
        with self._channel(target.endpoint) as channel:
            # The caller enforces the landing's deadline; this timeout only tells the prefill worker of it.
            seconds = opened.ticket.deadline_ms / 1000
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            call: Any = stub.Prefill(request, timeout=seconds, metadata=request_metadata())
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    # gRPC returns None for a message that it cannot parse.
                    if response is None:
                        raise InvalidRequest("it sent a malformed message")
                    if response.HasField("first_token"):
                        yield wire.first_output(opened.key, position, response.first_token)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            finally:
                call.cancel()

    @contextmanager
    def _channel(self, endpoint: str) -> Iterator[grpc.aio.Channel]:
        kept = self._channels.get(endpoint)
        if kept is None:
            kept = self._channels[endpoint] = _Channel(self._open(endpoint, Role.PREFILL))
        self._channels.move_to_end(endpoint)
        kept.calls += 1
        try:
            yield kept.channel
        finally:
            kept.calls -= 1
            self._forget_oldest_idle()

    def _forget_oldest_idle(self) -> None:
        idle = [endpoint for endpoint, kept in self._channels.items() if not kept.calls]
        if len(idle) > MAX_IDLE_CHANNELS:
            task = asyncio.create_task(self._channels.pop(idle[0]).channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
