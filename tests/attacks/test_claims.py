"""Whoever has a certificate is who it says, and no other: what others are known by cannot be replayed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from deepmesh.internal.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    scheduler_pb2_grpc,
    workers_pb2,
)

from kvstore.__main__ import running_store
from mesh.blocks import chain_hashes
from mesh.domain import worker_wire
from mesh.errors import InvalidRequest, MeshError, PermissionDenied
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role
from tests.support.certificates import certified, channels_as
from tests.support.decode_server import decode_without_rank
from tests.support.scheduler_server import ReportingWorker, identity_message, running_scheduler
from tests.support.store_agent import FakeAgents, worker_identity
from tests.support.stores import store_config

CHAIN = chain_hashes(range(64 * 2))


@asynccontextmanager
async def scheduler(directory: Path) -> AsyncIterator[str]:
    tls = certified(directory, Role.SCHEDULER, "scheduler").model_dump()
    async with running_scheduler(security={"tls": tls}) as endpoint:
        yield endpoint


async def report(directory: Path, endpoint: str, role: Role, name: str, **claims: Any) -> MeshError | None:
    """What a worker with that certificate is answered when it claims to be decode-1."""
    async with channels_as(directory, role, name).open(endpoint, Role.SCHEDULER) as channel:
        worker = ReportingWorker(scheduler_pb2_grpc.SchedulerServiceStub(channel), identity_message(**claims))
        try:
            await worker.start()
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        finally:
            worker.stop()
    return None


async def test_a_worker_registers_under_its_own_name_and_role_alone(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as endpoint:
        assert await report(tmp_path, endpoint, Role.DECODE, "decode-1") is None
        other_name = await report(tmp_path, endpoint, Role.DECODE, "decode-2")
        other_role = await report(tmp_path, endpoint, Role.PREFILL, "decode-1")
    assert isinstance(other_name, PermissionDenied)
    assert "decode 'decode-2' claims that worker_id is 'decode-1'" in other_name.message
    assert isinstance(other_role, PermissionDenied)


async def test_an_incarnation_replayed_by_another_worker_takes_no_lease(tmp_path: Path) -> None:
    async with (
        scheduler(tmp_path) as endpoint,
        channels_as(tmp_path, Role.DECODE, "decode-1").open(endpoint, Role.SCHEDULER) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        worker = await ReportingWorker(stub, identity_message(incarnation="seen")).start()
        thief = await report(tmp_path, endpoint, Role.DECODE, "decode-2", incarnation="seen")
        assert isinstance(thief, PermissionDenied)
        # Its stream goes on.
        await worker.report()
        worker.stop()


async def test_a_gateway_attaches_as_itself_alone(tmp_path: Path) -> None:
    tls = certified(tmp_path, Role.DECODE, "decode-1").model_dump()
    async with decode_without_rank(security={"tls": tls}) as running:
        assert isinstance(await attach(tmp_path, running.endpoint, "gateway-2", "gateway-1"), PermissionDenied)
        assert await attach(tmp_path, running.endpoint, "gateway-1", "gateway-1") is None


async def attach(directory: Path, endpoint: str, name: str, gateway_id: str) -> MeshError | None:
    async with channels_as(directory, Role.GATEWAY, name).open(endpoint, Role.DECODE) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Attach(timeout=60)
        hello = decode_pb2.AttachHello(gateway_id=gateway_id, gateway_incarnation="i")
        await call.write(decode_pb2.AttachRequest(hello=hello))
        try:
            response = await call.read()
            assert response.HasField("welcome")
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        finally:
            call.cancel()
    return None


async def test_a_store_session_serves_the_worker_that_opened_it_alone(tmp_path: Path) -> None:
    tls = certified(tmp_path, Role.KVSTORE, "store").model_dump()
    agents = FakeAgents()
    async with (
        running_store(store_config(security={"tls": tls}), agents) as server,
        channels_as(tmp_path, Role.PREFILL, "worker").open(server.endpoint, Role.KVSTORE) as own,
        channels_as(tmp_path, Role.PREFILL, "thief").open(server.endpoint, Role.KVSTORE) as other,
    ):
        worker, thief = map(kvstore_pb2_grpc.KvStoreServiceStub, (own, other))
        identity = worker_wire.identity_message(worker_identity("worker"))
        session = await worker.AttachWorker(kvstore_pb2.AttachWorkerRequest(worker=identity))
        offer = kvstore_pb2.OfferRequest(session_id=session.session_id, block_hashes=CHAIN)
        ticket = (await worker.Offer(offer)).ticket
        confirm = {"session_id": session.session_id, "transfer_id": ticket.transfer_id}
        for steal in (
            thief.AttachWorker(kvstore_pb2.AttachWorkerRequest(worker=identity, session_id=session.session_id)),
            thief.Offer(offer),
            thief.ConfirmOffer(kvstore_pb2.ConfirmOfferRequest(**confirm)),
            thief.WithdrawOffer(kvstore_pb2.WithdrawOfferRequest(**confirm)),
        ):
            with pytest.raises(PermissionDenied):
                await steal


@pytest.mark.parametrize("worker_id", ["decode-1\nWARNING all is lost", "decode\x1b[2J", "a\u2028b"])
def test_a_name_cannot_write_lines_of_its_own_into_logs(worker_id: str) -> None:
    message = identity_message(worker_id)
    assert isinstance(message, workers_pb2.WorkerIdentity)
    with pytest.raises(InvalidRequest, match="printable"):
        worker_wire.identity(message)
