"""A whole mesh of processes that authenticate one another, and a stranger on the same machine."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc, workers_pb2
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

from cli.status import read_workers
from launcher.composition import compose
from launcher.plan import HOST, MeshPlan
from launcher.serving import until_served
from launcher.supervisor import Supervisor
from mesh.errors import MeshError
from mesh.ports import free_port
from mesh.rpc.channel import Channels, MutualTlsChannels
from mesh.rpc.identity import Role
from tests.support.certificates import certified
from tests.support.forking import forked_services
from tests.support.process_mesh import oracle_settings

SERVICES = {
    "scheduler": (Role.SCHEDULER, "scheduler"),
    "kvstore": (Role.KVSTORE, "kvstore-0"),
    "prefill": (Role.PREFILL, "prefill-0"),
    "decode": (Role.DECODE, "decode-0"),
    "gateway": (Role.GATEWAY, "gateway"),
}


def settings(directory: Path) -> tuple[str, ...]:
    """Certificates of every service. They name this host too, for the supervisor, which asks all of them alike."""
    made = []
    for service, (role, name) in SERVICES.items():
        files = certified(directory, role, name, hosts=[HOST]).model_dump(mode="json")
        made.append(f"{service}.security.tls={json.dumps(files)}")
        if role is Role.GATEWAY:
            del files["ca"]
            made += [f"gateway.public_tls={json.dumps(files)}", "gateway.gateway_id=gateway"]
    return tuple(made)


async def test_over_mutual_tls_a_stranger_reaches_nothing(tmp_path: Path) -> None:
    mesh_settings = (*oracle_settings(), *settings(tmp_path), "scheduler.placement.handover_ms=0")
    plan = MeshPlan(None, 1, free_port(), free_port(), free_port(), mesh_settings, 1, (free_port(),))
    operator = MutualTlsChannels(certified(tmp_path, Role.OPERATOR, "me"))
    lines: list[str] = []
    supervisor = Supervisor(compose(plan), lambda name, line: lines.append(f"{name} {line}"), operator)
    gateway, scheduler = f"{HOST}:{plan.grpc_port}", f"{HOST}:{plan.scheduler_port}"
    try:
        with forked_services():
            await supervisor.start()
        await until_served(gateway, 1, operator)
        await until_attached(scheduler, operator)
        async with operator.open(gateway) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            request = gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(text="x" * 300), max_tokens=8)
            answers = [each async for each in stub.Generate(request, timeout=60)]
        assert answers[-1].HasField("finished")
        workers = [each.identity for each in (await read_workers(scheduler, operator)).workers]
        [endpoint] = [each.endpoint for each in workers if each.role == workers_pb2.WORKER_ROLE_DECODE]
        for stranger in (Channels(), operator):
            assert not await welcomed(endpoint, stranger)
        with pytest.raises(MeshError):
            await read_workers(scheduler, Channels())
    finally:
        await supervisor.stop()
    assert not [line for line in lines if "PERMISSION_DENIED" in line or "Traceback" in line]


async def until_attached(scheduler: str, channels: Channels) -> None:
    async with asyncio.timeout(60):
        while True:
            snapshot = await read_workers(scheduler, channels)
            if len(snapshot.workers) == 2 and [store.attached_workers for store in snapshot.stores] == [2]:
                return
            await asyncio.sleep(0.05)


async def welcomed(endpoint: str, channels: Channels) -> bool:
    """Whether the decode worker takes submissions straight from this caller: then it answers a hello."""
    async with channels.open(endpoint) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Attach(timeout=60)
        try:
            hello = decode_pb2.AttachHello(gateway_id="gateway", gateway_incarnation="i")
            await call.write(decode_pb2.AttachRequest(hello=hello))
            return await call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError:
            return False
        finally:
            call.cancel()
