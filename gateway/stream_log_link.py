"""Asks decode workers for what they have of a stream."""

import asyncio
from array import array
from collections.abc import Iterable, Sequence

import grpc
import msgspec
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc

from mesh.channel import Channels
from mesh.domain import wire
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import Submission
from mesh.domain.targets import WorkerTarget
from mesh.errors import MeshError
from mesh.identity import Role

# How long a worker may take to hand over its log: a hung one must not hold up a client whose log another has.
TAKE_SECONDS = 2.0


class TakenLog(msgspec.Struct, frozen=True):
    """What one worker has of a stream."""

    submission: Submission
    # Tokens behind the submission's.
    token_ids: Sequence[int]
    # How the request ended by itself; None if it did not.
    reason: FinishReason | None
    # Some of them were accepted in place of others that the seed gives.
    relaxed: bool

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: of two logs of one stream the one with the higher key has more of the answer."""
        stream, request = self.submission.stream, self.submission.request
        return 0 if stream is None else stream.epoch, request.attempt, len(request.token_ids) + len(self.token_ids)


async def take_logs(channels: Channels, targets: Iterable[WorkerTarget], stream_id: bytes) -> list[TakenLog]:
    """Ask all these workers at once for their logs of the stream. Its requests that still run end there."""
    taken = await asyncio.gather(*(_take(channels, target, stream_id) for target in targets))
    return [log for log in taken if log is not None]


async def _take(channels: Channels, target: WorkerTarget, stream_id: bytes) -> TakenLog | None:
    async with channels.open(target.endpoint, Role.DECODE) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        request = decode_pb2.TakeStreamRequest(stream_id=stream_id)
        try:
            response: decode_pb2.TakeStreamResponse = await stub.TakeStream(request, timeout=TAKE_SECONDS)
        except (MeshError, grpc.aio.AioRpcError):
            # It has no such stream, or is gone with it.
            return None
    output = response.output
    ended = wire.finish_reason(output.finished) if output.HasField("finished") else None
    reason = None if ended is FinishReason.CANCELLED else ended
    return TakenLog(wire.submission(response.submission), array("I", output.token_ids), reason, output.relaxed)
