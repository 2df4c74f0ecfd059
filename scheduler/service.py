"""SchedulerService: turns messages into calls of the registry and the coordinator, and answers back into messages."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from mesh.domain import placement_wire, worker_wire
from mesh.domain.placement import PlacementQuery
from mesh.errors import InvalidRequest, MeshError, Overloaded, Retry
from mesh.observe.metrics import SCHEDULER_DECISION_SECONDS, SCHEDULER_PLACEMENTS, SCHEDULER_REFUSALS
from mesh.rpc.identity import check_worker
from scheduler import wire
from scheduler.coordinator import Coordinator, ExplainedPlacement
from scheduler.decisions import DecisionLog
from scheduler.live_worker import Lease
from scheduler.registry import Registry
from scheduler.scaling.scaler import Scaler
from scheduler.stores import Stores

# Number of a request's first attempt.
FIRST_ATTEMPT = 1
Context = grpc.aio.ServicerContext[object, object]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(
        self,
        registry: Registry,
        stores: Stores,
        coordinator: Coordinator,
        decisions: DecisionLog,
        scaler: Scaler,
        max_watchers: int,
    ) -> None:
        self._registry = registry
        self._stores = stores
        self._coordinator = coordinator
        self._decisions = decisions
        self._scaler = scaler
        self._max_watchers = max_watchers
        self._watchers = 0

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: Context) -> scheduler_pb2.PlaceResponse:
        start = time.perf_counter()
        try:
            answer = await self._place(wire.placement_query(request))
        except MeshError as error:
            SCHEDULER_REFUSALS.labels(error.reason).inc()
            raise
        finally:
            SCHEDULER_DECISION_SECONDS.observe(time.perf_counter() - start)
        return wire.place_response(answer)

    async def ReportOutcome(
        self, request: scheduler_pb2.ReportOutcomeRequest, context: Context
    ) -> scheduler_pb2.ReportOutcomeResponse:
        report = placement_wire.report(request)
        if self._coordinator.report(report):
            SCHEDULER_PLACEMENTS.labels(report.outcome.value).inc()
        return scheduler_pb2.ReportOutcomeResponse()

    async def ReportStatus(
        self, request_iterator: AsyncIterator[scheduler_pb2.ReportStatusRequest], context: Context
    ) -> AsyncIterator[scheduler_pb2.ReportStatusResponse]:
        response = scheduler_pb2.ReportStatusResponse()
        response.lease.FromMilliseconds(int(self._registry.lease_seconds * 1000))
        lease: Lease | None = None
        try:
            async for request in request_iterator:
                if lease is None:
                    lease = self._attach(request)
                self._apply(lease, request)
                yield response
        finally:
            if lease is not None:
                self._registry.detach(lease)

    async def WatchWorkers(
        self, request: scheduler_pb2.WatchWorkersRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.WatchWorkersResponse]:
        if self._watchers >= self._max_watchers:
            raise Overloaded(f"the scheduler serves at most {self._max_watchers} watchers", retry_after_ms=10_000)
        self._watchers += 1
        try:
            while True:
                version = self._registry.version
                # The generator blocks here if a watcher does not read; once it reads again, it gets the latest
                # snapshot.
                yield wire.watch_response(self._registry, self._stores)
                await self._registry.changed(version)
        finally:
            self._watchers -= 1

    async def ListDecisions(
        self, request: scheduler_pb2.ListDecisionsRequest, context: Context
    ) -> scheduler_pb2.ListDecisionsResponse:
        limit = min(request.limit or wire.DEFAULT_LISTED_DECISIONS, wire.MAX_LISTED_DECISIONS)
        kept = self._decisions.newest(limit, request.request_id or None)
        return scheduler_pb2.ListDecisionsResponse(decisions=[wire.decision(decision) for decision in kept])

    async def GetScaling(
        self, request: scheduler_pb2.GetScalingRequest, context: Context
    ) -> scheduler_pb2.GetScalingResponse:
        roles = [
            wire.role_scaling(model, role, self._scaler.serving(model, role), wanted)
            for (model, role), wanted in self._scaler.decided().items()
        ]
        return scheduler_pb2.GetScalingResponse(roles=roles)

    async def _place(self, query: PlacementQuery) -> ExplainedPlacement:
        """Place the request and count its arrival. A request that is placed again was counted before."""
        again = query.attempt > FIRST_ATTEMPT
        try:
            answer = await self._coordinator.place(query)
        except MeshError as error:
            if not again and error.retry is not Retry.NEVER:
                self._scaler.arrivals.refused(query.model, query.prompt_tokens)
            raise
        if not again:
            self._scaler.arrivals.placed(query.model, query.prompt_tokens, answer.chosen.uncached_tokens)
        return answer

    def _attach(self, request: scheduler_pb2.ReportStatusRequest) -> Lease:
        if not request.HasField("identity"):
            raise InvalidRequest("the first message of a status stream must carry identity", field="identity")
        identity = worker_wire.identity(request.identity)
        check_worker(identity.worker_id, identity.role)
        return self._registry.attach(identity)

    def _apply(self, lease: Lease, request: scheduler_pb2.ReportStatusRequest) -> None:
        self._registry.update(
            lease,
            worker_wire.state(request.state),
            worker_wire.load(request.load),
            worker_wire.transfers(request.transfers),
            [worker_wire.rank(rank) for rank in request.ranks],
        )
        if request.HasField("kv_events"):
            events = request.kv_events
            stored = wire.block_hashes(events.stored, "kv_events.stored")
            removed = wire.block_hashes(events.removed, "kv_events.removed")
            holders = wire.holders(events)
            self._registry.record_blocks(lease, events.snapshot, stored, removed, holders)
        if request.leaving:
            self._registry.leave(lease)
