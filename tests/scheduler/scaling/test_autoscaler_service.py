"""KEDA's external scaler, and GetScaling, over a real connection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from deepmesh.internal.v1 import scheduler_pb2, workers_pb2
from deepmesh.keda import externalscaler_pb2, externalscaler_pb2_grpc

from mesh.errors import InvalidRequest, NoWorker
from mesh.rpc.channel import Channels
from tests.support.scheduler_server import ReportingWorker, identity_message, running_scheduler, scheduler_stub

QUICK = {"scale_in_seconds": 0.0, "period_seconds": 0.02}


def scaled(role: str, **metadata: str) -> externalscaler_pb2.ScaledObjectRef:
    return externalscaler_pb2.ScaledObjectRef(name=role, namespace="n", scalerMetadata={"role": role, **metadata})


@asynccontextmanager
async def keda(endpoint: str) -> AsyncIterator[Any]:
    async with Channels().open(endpoint) as channel:
        yield externalscaler_pb2_grpc.ExternalScalerStub(channel)


async def busy_worker(stub: Any, running: int, **identity: Any) -> ReportingWorker:
    load = workers_pb2.WorkerLoad(running_requests=running, free_blocks=1000, decode_step_ms=10.0)
    return await ReportingWorker(stub, identity_message(**identity)).start(load=load)


async def metric(scaler: Any, ref: externalscaler_pb2.ScaledObjectRef) -> int:
    request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=ref, metricName="wanted-replicas")
    (value,) = (await scaler.GetMetrics(request)).metricValues
    return int(value.metricValue)


async def test_keda_gets_wanted_replicas_with_a_target_of_one() -> None:
    async with running_scheduler(scaling=QUICK) as endpoint, scheduler_stub(endpoint) as stub, keda(endpoint) as scaler:
        # A worker runs eight at once, and 7 are more than three quarters of that.
        await busy_worker(stub, running=7)
        (spec,) = (await scaler.GetMetricSpec(scaled("decode"))).metricSpecs
        assert (spec.metricName, spec.targetSize) == ("wanted-replicas", 1)
        assert await metric(scaler, scaled("decode")) == 2
        assert await metric(scaler, scaled("decode", model="oracle")) == 2
        assert await metric(scaler, scaled("decode", model="another")) == 0
        assert (await scaler.IsActive(scaled("decode"))).result
        assert not (await scaler.IsActive(scaled("prefill"))).result


async def test_keda_hears_when_there_is_work_again() -> None:
    async with running_scheduler(scaling=QUICK) as endpoint, scheduler_stub(endpoint) as stub, keda(endpoint) as scaler:
        call = scaler.StreamIsActive(scaled("decode"))
        assert not (await call.read()).result
        await busy_worker(stub, running=1)
        assert (await call.read()).result
        call.cancel()


async def test_a_model_without_workers_is_wanted_once_requested() -> None:
    lease = {"seconds": 0.2, "gather_seconds": 0.0}
    async with running_scheduler(scaling=QUICK, lease=lease) as endpoint, scheduler_stub(endpoint) as stub:
        worker = await busy_worker(stub, running=0)
        worker.stop()
        await until_no_worker(stub)
        assert [role.wanted_replicas for role in await scaling(stub)] == []
        with pytest.raises(NoWorker):
            await stub.Place(
                scheduler_pb2.PlaceRequest(
                    generation_id="g", request_id="r", model="oracle", prompt_tokens=2000, max_tokens=9
                )
            )
        assert {role.role: role.wanted_replicas for role in await scaling(stub)} == {
            workers_pb2.WORKER_ROLE_DECODE: 1,
            workers_pb2.WORKER_ROLE_PREFILL: 1,
        }


async def scaling(stub: Any) -> list[scheduler_pb2.RoleScaling]:
    response = await stub.GetScaling(scheduler_pb2.GetScalingRequest())
    return [role for role in response.roles if role.wanted_replicas]


async def until_no_worker(stub: Any) -> None:
    async for response in stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest()):
        if not response.workers:
            return


async def test_a_role_is_listed_with_its_needs_and_why() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await busy_worker(stub, running=7)
        (decode,) = await scaling(stub)
        assert (decode.model, decode.serving_replicas, decode.wanted_replicas) == ("oracle", 1, 2)
        assert decode.reason == "7 requests at mean output length, 8 a replica"


async def test_a_trigger_without_a_role_is_refused_in_words() -> None:
    async with running_scheduler() as endpoint, keda(endpoint) as scaler:
        with pytest.raises(InvalidRequest, match="role: prefill or decode"):
            await scaler.IsActive(scaled("gateway"))
