"""A scheduler that places as a test says, over real gRPC."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, targets_pb2, workers_pb2

from mesh.config import ServerConfig
from mesh.errors import MeshError, NoWorker
from mesh.rpc.server import MeshServer, Registration


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Places on the first decode worker that is not avoided, with the first such prefill worker if there is one.

    Tests set `refusals`, `store` and the ranks, and read what arrived.
    """

    # So long that no lease ends on a busy machine. Tests of a lease's end set it.
    lease_seconds: float = 60.0
    workers: dict[str, workers_pb2.WorkerIdentity] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    # Errors that Place raises instead of an answer, one for each call.
    refusals: list[MeshError] = field(default_factory=list)
    # The store that every placement names.
    store: targets_pb2.StoreTarget | None = None
    # Ranks of the decode worker and of the prefill worker that every placement names.
    decode_rank: int | None = None
    prefill_rank: int | None = None
    # Seconds that it takes for the first answer to any call but ReportOutcome.
    answer_seconds: float = 0.0
    queries: list[scheduler_pb2.PlaceRequest] = field(default_factory=list)
    outcomes: list[scheduler_pb2.ReportOutcomeRequest] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self._changed: set[asyncio.Event] = set()

    def add(self, identity: workers_pb2.WorkerIdentity) -> None:
        self.workers[identity.worker_id] = identity
        self._notify()

    def remove(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self._notify()

    def server(self, port: int = 0) -> MeshServer:
        """A server that the test enters. The test sets `port` afterwards."""
        add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
        registration = Registration(add, self, "deepmesh.internal.v1.SchedulerService", ("WatchWorkers",))
        return MeshServer(ServerConfig(port=port, drain_seconds=0), "fake scheduler", [registration])

    async def ListDecisions(
        self, request: scheduler_pb2.ListDecisionsRequest, context: Any
    ) -> scheduler_pb2.ListDecisionsResponse:
        """The requests that it was asked to place, newest first, each as if placed on the first worker."""
        worker_id = next(iter(self.workers), "")
        decisions = [
            scheduler_pb2.Decision(request_id=query.request_id, worker_id=worker_id, reason="it is the first")
            for query in reversed(self.queries[-request.limit :])
        ]
        return scheduler_pb2.ListDecisionsResponse(decisions=decisions)

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: Any) -> scheduler_pb2.PlaceResponse:
        self.queries.append(request)
        await asyncio.sleep(self.answer_seconds)
        if self.refusals:
            raise self.refusals.pop(0)
        decodes = self._targets(request, workers_pb2.WORKER_ROLE_DECODE)
        prefills = self._targets(request, workers_pb2.WORKER_ROLE_PREFILL)
        if not decodes:
            raise NoWorker("no worker")
        prefill = prefills[0] if prefills else None
        return scheduler_pb2.PlaceResponse(
            decode=decodes[0],
            prefill=prefill,
            store=self.store,
            reason="first",
            decode_rank=self.decode_rank,
            prefill_rank=self.prefill_rank,
        )

    async def ReportOutcome(
        self, request: scheduler_pb2.ReportOutcomeRequest, context: Any
    ) -> scheduler_pb2.ReportOutcomeResponse:
        self.outcomes.append(request)
        return scheduler_pb2.ReportOutcomeResponse()

    async def WatchWorkers(self, request: scheduler_pb2.WatchWorkersRequest, context: Any) -> Any:
        await asyncio.sleep(self.answer_seconds)
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            while True:
                changed.clear()
                yield self._snapshot()
                await changed.wait()
        finally:
            self._changed.discard(changed)

    def _targets(
        self, request: scheduler_pb2.PlaceRequest, role: workers_pb2.WorkerRole
    ) -> list[targets_pb2.WorkerTarget]:
        return [
            targets_pb2.WorkerTarget(
                worker_id=worker_id,
                incarnation=identity.incarnation,
                endpoint=identity.endpoint,
                slot_bytes=identity.slot_bytes,
            )
            for worker_id, identity in self.workers.items()
            if worker_id not in request.avoid_worker_ids and (identity.model, identity.role) == (request.model, role)
        ]

    def _snapshot(self) -> scheduler_pb2.WatchWorkersResponse:
        response = scheduler_pb2.WatchWorkersResponse()
        response.lease.FromMilliseconds(int(1000 * self.lease_seconds))
        for worker_id, identity in self.workers.items():
            draining = worker_id in self.draining
            state = workers_pb2.WORKER_STATE_DRAINING if draining else workers_pb2.WORKER_STATE_SERVING
            response.workers.append(scheduler_pb2.WorkerStatus(identity=identity, state=state))
        return response

    def _notify(self) -> None:
        for changed in self._changed:
            changed.set()
