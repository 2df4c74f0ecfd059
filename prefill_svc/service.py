"""PrefillService: one call a prompt, read and written at the same time."""

# grpc's classes are generic in their stubs alone.
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from deepmesh.v1 import prefill_pb2, prefill_pb2_grpc

from mesh.errors import InvalidRequest, MeshError, NoWorker
from mesh.metrics import PREFILL_ENDED, PREFILL_PUSHED_BYTES
from prefill_svc import wire
from prefill_svc.prompts import Job
from prefill_svc.worker import PrefillWorker
from transfer.events import PushEnded

START_SECONDS = 10.0


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves nothing until `open`: the model loads while the process is alive already."""

    def __init__(self) -> None:
        self._worker: PrefillWorker | None = None

    def open(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(
        self,
        request_iterator: AsyncIterator[prefill_pb2.PrefillRequest],
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        worker = self._worker
        if worker is None:
            raise NoWorker("this worker is still loading its model: retry")
        outcome = "cancelled"
        try:
            job = worker.submit(wire.prompt(await _start(request_iterator)))
            reader = asyncio.create_task(_read(worker, job, request_iterator))
            try:
                yield wire.accepted(worker.predicted_seconds(job.prompt))
                while not isinstance(event := await job.next_event(), PushEnded):
                    yield wire.response(event)
                PREFILL_PUSHED_BYTES.labels(event.transport).inc(event.size_bytes)
                yield wire.response(event)
                outcome = "done"
            finally:
                worker.jobs.end(job)
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        except MeshError as error:
            outcome = error.reason
            raise
        finally:
            PREFILL_ENDED.labels(outcome).inc()


async def _start(requests: AsyncIterator[prefill_pb2.PrefillRequest]) -> prefill_pb2.PrefillStart:
    try:
        async with asyncio.timeout(START_SECONDS):
            request = await anext(requests, None)
    except TimeoutError as error:
        raise InvalidRequest(f"no start within {START_SECONDS:g} s of the call") from error
    if request is None or request.WhichOneof("message") != "start":
        raise InvalidRequest("the first message of the call must be start", field="start")
    return request.start


async def _read(worker: PrefillWorker, job: Job, requests: AsyncIterator[prefill_pb2.PrefillRequest]) -> None:
    """Follow what the caller grants; a mistake in it fails the job. It may stop sending: it has granted all it will."""
    try:
        async for request in requests:
            if request.WhichOneof("message") != "grant":
                raise InvalidRequest("a call has one start, its first message", field="start")
            worker.jobs.grant(job, request.grant.transfer_id, request.grant.segment)
    except MeshError as error:
        job.fail(error)
