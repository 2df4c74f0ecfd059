"""A certificate opens only the methods of its role, in the tables that the services are composed with."""

from collections.abc import Collection, Mapping
from pathlib import Path

import grpc
import pytest
from deepmesh.internal.v1 import (
    decode_pb2,
    hosts_pb2,
    kvstore_pb2,
    prefill_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
)
from deepmesh.v1 import kv_events_pb2

import decode_svc.__main__ as decode
import kvstore.__main__ as kvstore
import prefill_svc.__main__ as prefill
import scheduler.__main__ as scheduler
from cli.endpoints import certified_channels
from cli.status import read_workers
from mesh.errors import EndpointUnavailable, PermissionDenied
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role
from tests.support.certificates import certified, channels_as
from tests.support.scheduler_server import running_scheduler
from worker import role_service
from worker.events import service as events
from worker.hosts import service as hosts

FILES = (scheduler_pb2, decode_pb2, prefill_pb2, kvstore_pb2, worker_pb2, hosts_pb2, kv_events_pb2)
TABLES: Mapping[str, Mapping[str, Collection[Role]]] = {
    scheduler.SERVICE: scheduler.SERVES,
    decode.SERVICE: decode.SERVES,
    prefill.SERVICE: prefill.SERVES,
    kvstore.SERVICE: kvstore.SERVES,
    role_service.SERVICE: role_service.SERVES,
    hosts.SERVICE: hosts.SERVES,
    events.SERVICE: events.SERVES,
}


def test_every_method_between_services_names_the_roles_that_it_serves() -> None:
    methods = {
        service.full_name: {method.name for method in service.methods}
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
    }
    assert {service: set(table) for service, table in TABLES.items()} == methods
    assert all(roles for table in TABLES.values() for roles in table.values())


def test_only_gateways_submit_and_only_decode_workers_have_prompts_computed() -> None:
    assert set(decode.SERVES["Attach"]) == {Role.GATEWAY}
    assert set(prefill.SERVES["Prefill"]) == {Role.DECODE}


def test_who_may_only_look_changes_no_role() -> None:
    assert set(role_service.SERVES["ChangeRole"]) == {Role.AUTOSCALER}


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.OPERATOR, Role.KVSTORE, Role.SCHEDULER])
async def test_only_workers_report_status(tmp_path: Path, role: Role) -> None:
    tls = certified(tmp_path, Role.SCHEDULER, "scheduler").model_dump()
    async with (
        running_scheduler(security={"tls": tls}) as endpoint,
        channels_as(tmp_path, role, "x").open(endpoint, Role.SCHEDULER) as channel,
    ):
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).ReportStatus(timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert isinstance(from_rpc_error(raised.value), PermissionDenied)


async def test_an_operator_with_certificates_reads_the_status(tmp_path: Path) -> None:
    tls = certified(tmp_path, Role.SCHEDULER, "scheduler").model_dump()
    operator = certified(tmp_path, Role.OPERATOR, "me").key.parent
    async with running_scheduler(security={"tls": tls}) as endpoint:
        assert not (await read_workers(endpoint, certified_channels(operator))).workers
        with pytest.raises(EndpointUnavailable):
            await read_workers(endpoint, certified_channels(None))


async def test_a_worker_places_nothing(tmp_path: Path) -> None:
    tls = certified(tmp_path, Role.SCHEDULER, "scheduler").model_dump()
    async with (
        running_scheduler(security={"tls": tls}) as endpoint,
        channels_as(tmp_path, Role.DECODE, "d").open(endpoint, Role.SCHEDULER) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with pytest.raises(PermissionDenied):
            await stub.Place(scheduler_pb2.PlaceRequest(model="m"), timeout=60)
