"""A scheduler and a decode worker with nothing behind them: every frame has the next token of every request.

    python -m bench.gateway_relay.frame_source PORT

Frames follow one another as fast as the gateway takes them, so that it alone bounds the tokens that its clients get.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop
from deepmesh.internal.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    targets_pb2,
    workers_pb2,
)

from bench.gateway_relay.token_source import Settling
from bench.meshes.oracle_mesh import CONTEXT_TOKENS, MODEL, VOCABULARY_SIZE
from launcher.plan import HOST
from mesh.config import ServerConfig
from mesh.rpc.server import MeshServer, Registration

INCARNATION = "first"
LEASE_SECONDS = 10
NEWS_SECONDS = 1.0
# The source waits so long between looks while it has no request.
IDLE_SECONDS = 0.01
# Ids of letters in the oracle's tokenizer.
FIRST_TOKEN, LAST_TOKEN = 100, 120


class OneWorker(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Places every request on the worker in its process."""

    def __init__(self, identity: workers_pb2.WorkerIdentity) -> None:
        self._identity = identity

    async def WatchWorkers(
        self, request: scheduler_pb2.WatchWorkersRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchWorkersResponse]:
        snapshot = scheduler_pb2.WatchWorkersResponse()
        snapshot.lease.FromSeconds(LEASE_SECONDS)
        snapshot.workers.add(identity=self._identity, state=workers_pb2.WORKER_STATE_SERVING)
        while True:
            yield snapshot
            await asyncio.sleep(NEWS_SECONDS)

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: Any) -> scheduler_pb2.PlaceResponse:
        target = targets_pb2.WorkerTarget(
            worker_id=self._identity.worker_id, incarnation=INCARNATION, endpoint=self._identity.endpoint
        )
        return scheduler_pb2.PlaceResponse(decode=target, reason="the only one")

    async def ReportOutcome(
        self, request: scheduler_pb2.ReportOutcomeRequest, context: Any
    ) -> scheduler_pb2.ReportOutcomeResponse:
        return scheduler_pb2.ReportOutcomeResponse()


class FrameSource(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, identity: workers_pb2.WorkerIdentity) -> None:
        self._identity = identity

    async def Attach(self, requests: Any, context: Any) -> None:
        await context.read()
        welcome = decode_pb2.AttachWelcome(identity=self._identity, grace_ms=1000)
        await context.write(decode_pb2.AttachResponse(welcome=welcome))
        # The position of each stream's next token.
        positions: dict[int, int] = {}
        settling = Settling()
        reading = asyncio.create_task(_follow(context, positions, settling))
        try:
            token = FIRST_TOKEN
            while True:
                frame = decode_pb2.StepFrame()
                for stream_id, position in positions.items():
                    frame.outputs.add(stream_id=stream_id, attempt=1, first_position=position, token_ids=(token,))
                    positions[stream_id] = position + 1
                token = FIRST_TOKEN if token == LAST_TOKEN else token + 1
                if positions:
                    await settling.pause()
                    await context.write(decode_pb2.AttachResponse(frame=frame))
                else:
                    await asyncio.sleep(IDLE_SECONDS)
        finally:
            reading.cancel()


async def _follow(context: Any, positions: dict[int, int], settling: Settling) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        kind = message.WhichOneof("message")
        if kind == "submission":
            settling.begun()
            positions[message.submission.stream_id] = len(message.submission.token_ids)
        elif kind == "cancellation":
            positions.pop(message.cancellation.stream_id, None)


async def serve_frames(port: int) -> None:
    identity = workers_pb2.WorkerIdentity(
        worker_id="frames",
        incarnation=INCARNATION,
        role=workers_pb2.WORKER_ROLE_DECODE,
        endpoint=f"{HOST}:{port}",
        model=MODEL,
        max_requests=100_000,
        context_tokens=CONTEXT_TOKENS,
        vocabulary_size=VOCABULARY_SIZE,
        can_prefill=True,
    )
    registrations = [
        Registration(
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            OneWorker(identity),
            "deepmesh.internal.v1.SchedulerService",
            ("WatchWorkers",),
        ),
        Registration(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server,
            FrameSource(identity),
            "deepmesh.internal.v1.DecodeService",
            ("Attach",),
        ),
    ]
    async with MeshServer(ServerConfig(port=port, drain_seconds=0), "frames", registrations) as server:
        await server.ready()
        await server.until_signal()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    uvloop.run(serve_frames(parser.parse_args().port))
