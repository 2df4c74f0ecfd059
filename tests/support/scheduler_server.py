"""A scheduler on a loopback port, and a worker's side of its status stream."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2

from mesh.rpc.channel import Channels
from scheduler.__main__ import running
from scheduler.config import SchedulerConfig


@asynccontextmanager
async def running_scheduler(**config: Any) -> AsyncIterator[str]:
    """Run a scheduler; yields its endpoint. By default it does not gather leases of an earlier scheduler first."""
    config["lease"] = {"gather_seconds": 0.0, **config.get("lease", {})}
    async with running(SchedulerConfig.model_validate({"server": {"drain_seconds": 0.5}, **config})) as server:
        yield server.endpoint


@asynccontextmanager
async def scheduler_stub(endpoint: str) -> AsyncIterator[Any]:
    async with Channels().open(endpoint) as channel:
        yield scheduler_pb2_grpc.SchedulerServiceStub(channel)


def identity_message(worker_id: str = "decode-1", **changes: Any) -> workers_pb2.WorkerIdentity:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": "first",
        "role": workers_pb2.WORKER_ROLE_DECODE,
        "endpoint": f"{worker_id}:1",
        "model": "oracle",
        "kv_namespace": workers_pb2.KvNamespace(
            weights_fingerprint="f", dtype="oracle", scale=1.0, layers=1, block_tokens=64, layout="oracle"
        ),
        "context_tokens": 4096,
        "total_blocks": 1000,
        "max_requests": 8,
        "can_prefill": True,
        "receives_kv": True,
        "ranks": 1,
        "vocabulary_size": 1000,
        "block_bytes": 4096,
        "worker_class": "oracle",
        "max_step_tokens": 8192,
        **changes,
    }
    return workers_pb2.WorkerIdentity(**values)


def status_message(**fields: Any) -> scheduler_pb2.ReportStatusRequest:
    values: dict[str, Any] = {
        "state": workers_pb2.WORKER_STATE_SERVING,
        "load": workers_pb2.WorkerLoad(
            free_blocks=1000,
            prefill_tokens_per_second=1000.0,
            exact_prompts=workers_pb2.PromptPace(tokens_per_second=1000.0),
            decode_step_ms=10.0,
        ),
        **fields,
    }
    return scheduler_pb2.ReportStatusRequest(**values)


@dataclass
class ReportingWorker:
    """A worker's status stream with the messages that a test gives. Each message is answered before the next is
    sent.
    """

    stub: Any
    identity: workers_pb2.WorkerIdentity
    call: Any = field(init=False)

    async def start(self, **fields: Any) -> "ReportingWorker":
        self.call = self.stub.ReportStatus()
        await self.report(identity=self.identity, **fields)
        return self

    async def report(self, **fields: Any) -> scheduler_pb2.ReportStatusResponse:
        await self.call.write(status_message(**fields))
        response = await self.call.read()
        if response is grpc.aio.EOF:
            # Raise the error that ended the stream.
            raise grpc.aio.AioRpcError(
                await self.call.code(),
                await self.call.initial_metadata(),
                await self.call.trailing_metadata(),
                await self.call.details(),
            )
        answer: scheduler_pb2.ReportStatusResponse = response
        return answer

    def stop(self) -> None:
        self.call.cancel()
