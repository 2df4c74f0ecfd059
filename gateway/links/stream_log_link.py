"""Asks decode workers for their log of a stream."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import msgspec
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc

from mesh.domain import wire
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import Submission
from mesh.domain.targets import WorkerTarget
from mesh.errors import MeshError
from mesh.rpc.channel import Channels
from mesh.rpc.identity import Role

# Bounds how long a worker may take to hand over its log: a hung one must not delay a client whose log another has.
TAKE_SECONDS = 2.0


class TakenLog(msgspec.Struct, frozen=True):
    """One worker's log of a stream."""

    submission: Submission
    # Tokens generated after those in the submission.
    token_ids: Sequence[int]
    # How the request ended by itself; None if it did not.
    reason: FinishReason | None
    # Whether some tokens were accepted in place of others that the seed gives.
    relaxed: bool

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: of two logs of one stream, the one with the higher key holds more of the answer."""
        stream, request = self.submission.stream, self.submission.request
        return 0 if stream is None else stream.epoch, request.attempt, len(request.token_ids) + len(self.token_ids)


@dataclass
class _Shared:
    channel: grpc.aio.Channel
    users: int = 0


class StreamLogs:
    """Fetches logs of streams from workers. Clients of a dead gateway resume all at once, so concurrent calls to a
    worker share a channel.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        # Open channels by endpoint.
        self._open: dict[str, _Shared] = {}

    async def take(self, targets: Iterable[WorkerTarget], stream_id: bytes) -> list[TakenLog]:
        """Ask all these workers at once for their logs of the stream. A request of the stream that still runs there
        ends.
        """
        taken = await asyncio.gather(*(self._take(target, stream_id) for target in targets))
        return [log for log in taken if log is not None]

    async def _take(self, target: WorkerTarget, stream_id: bytes) -> TakenLog | None:
        request = decode_pb2.TakeStreamRequest(stream_id=stream_id)
        async with self._channel(target.endpoint) as channel:
            try:
                response = await decode_pb2_grpc.DecodeServiceStub(channel).TakeStream(request, timeout=TAKE_SECONDS)
            except (MeshError, grpc.aio.AioRpcError):
                # The worker does not have the stream, or is gone.
                return None
        return _log(response)

    @asynccontextmanager
    async def _channel(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        if endpoint not in self._open:
            self._open[endpoint] = _Shared(self._channels.open(endpoint, Role.DECODE))
        shared = self._open[endpoint]
        shared.users += 1
        try:
            yield shared.channel
        finally:
            shared.users -= 1
            if not shared.users:
                del self._open[endpoint]
                await shared.channel.close()


def _log(response: decode_pb2.TakeStreamResponse) -> TakenLog:
    output = response.output
    ended = wire.finish_reason(output.finished) if output.HasField("finished") else None
    reason = None if ended is FinishReason.CANCELLED else ended
    return TakenLog(wire.submission(response.submission), array("I", output.token_ids), reason, output.relaxed)
