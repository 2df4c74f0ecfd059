"""KEDA's external scaler: offers the replicas that the scheduler wants through KEDA's API.

A ScaledObject's trigger names a role, and a model if the mesh serves several. The metric is the number of wanted
replicas, with a target of 1: its average over the replicas is 1 if there are as many as are wanted.
"""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from deepmesh.keda import externalscaler_pb2, externalscaler_pb2_grpc

from mesh.domain.workers import WorkerRole
from mesh.errors import InvalidRequest
from scheduler.scaling.scaler import Scaler

METRIC = "wanted-replicas"
Context = grpc.aio.ServicerContext[object, object]


class AutoscalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    def __init__(self, scaler: Scaler, period_seconds: float) -> None:
        self._scaler = scaler
        self._period_seconds = period_seconds

    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> externalscaler_pb2.IsActiveResponse:
        return externalscaler_pb2.IsActiveResponse(result=self._wanted(request) > 0)

    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> AsyncIterator[externalscaler_pb2.IsActiveResponse]:
        told: bool | None = None
        while True:
            active = self._wanted(request) > 0
            if active is not told:
                yield externalscaler_pb2.IsActiveResponse(result=active)
                told = active
            await asyncio.sleep(self._period_seconds)

    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        _role_and_model(request)
        spec = externalscaler_pb2.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, context: Context
    ) -> externalscaler_pb2.GetMetricsResponse:
        wanted = self._wanted(request.scaledObjectRef)
        name = request.metricName or METRIC
        value = externalscaler_pb2.MetricValue(metricName=name, metricValue=wanted, metricValueFloat=float(wanted))
        return externalscaler_pb2.GetMetricsResponse(metricValues=[value])

    def _wanted(self, request: externalscaler_pb2.ScaledObjectRef) -> int:
        return self._scaler.replicas(*_role_and_model(request))


def _role_and_model(request: externalscaler_pb2.ScaledObjectRef) -> tuple[WorkerRole, str | None]:
    """Raises InvalidRequest."""
    role, roles = request.scalerMetadata.get("role", ""), [each.value for each in WorkerRole]
    if role not in roles:
        raise InvalidRequest(f"the trigger's metadata needs role: {' or '.join(roles)}", field="scalerMetadata")
    return WorkerRole(role), request.scalerMetadata.get("model") or None
