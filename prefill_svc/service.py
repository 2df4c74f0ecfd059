"""PrefillService: one call for each prompt."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from deepmesh.internal.v1 import prefill_pb2, prefill_pb2_grpc

from mesh.errors import MeshError, NoWorker
from mesh.observe.metrics import PREFILL_ENDED, PREFILL_PUSHED_BYTES
from mesh.observe.spans import span
from mesh.observe.tracing import current_traceparent
from prefill_svc import wire
from prefill_svc.worker import PrefillWorker
from transfer.events import PushEnded


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves nothing until `open`: the process is alive already while the model loads."""

    def __init__(self) -> None:
        self._worker: PrefillWorker | None = None

    def open(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        worker = self._worker
        if worker is None:
            raise NoWorker("this worker is still loading its model: retry")
        outcome = "cancelled"
        try:
            with span("prefill.prompt", attempt=request.attempt, prompt_tokens=len(request.token_ids)):
                job = worker.submit(wire.prompt(request, current_traceparent()))
                try:
                    yield wire.accepted(worker.predicted_seconds(job.prompt))
                    while not isinstance(event := await job.next_event(), PushEnded):
                        yield wire.response(event)
                    PREFILL_PUSHED_BYTES.labels(event.transport).inc(event.size_bytes)
                    yield wire.response(event)
                    outcome = "done"
                finally:
                    worker.jobs.end(job)
        except MeshError as error:
            outcome = error.reason
            raise
        finally:
            PREFILL_ENDED.labels(outcome).inc()
