"""The gateway as a process of its own: `python -m gateway`."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import yaml
from deepmesh.v1 import gateway_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewayConfig
from mesh.config_values import load
from mesh.errors import ConfigError
from mesh.ports import free_port
from tests.support.addresses import NOWHERE
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import run_to_its_end, spawn
from tests.support.gateways import ids_request
from tests.support.tokenizers import tokenizer_directory

ROOT = Path(__file__).parents[2]
PORTS = re.compile(r"listening grpc_port=(\d+) http_port=(\d+)")


async def ports_of(process: asyncio.subprocess.Process) -> tuple[int, int]:
    """What it says once it listens."""
    assert process.stderr is not None
    async for line in process.stderr:
        if found := PORTS.search(line.decode()):
            return int(found[1]), int(found[2])
    raise AssertionError("the gateway ended before it listened")


@asynccontextmanager
async def running_gateway(*settings: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, int]]:
    process = await spawn(*settings)
    try:
        yield process, *await asyncio.wait_for(ports_of(process), 60)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def readiness(channel: grpc.aio.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service="readiness")
    return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status)


async def until_health(channel: grpc.aio.Channel, status: int) -> None:
    request = health_pb2.HealthCheckRequest(service="readiness")
    async for response in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=60):
        if response.status == status:
            return


async def test_it_is_ready_with_a_worker_and_stops() -> None:
    scheduler, worker = FakeScheduler(), FakeDecodeWorker()
    models = f'models=[{{"tokenizer_dir": "{tokenizer_directory()}", "name": "oracle"}}]'
    async with scheduler.server() as server, worker.started():
        metrics = free_port()
        settings = (
            f"scheduler=127.0.0.1:{server.port}",
            models,
            f"server.metrics_port={metrics}",
            "observe.access_log=true",
        )
        async with running_gateway(*settings) as (process, grpc_port, http_port), httpx.AsyncClient(timeout=60) as http:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                base = f"http://127.0.0.1:{http_port}"
                assert await readiness(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
                assert (await http.get(f"{base}/health")).status_code == 503
                scheduler.add(worker.identity())
                await until_health(channel, health_pb2.HealthCheckResponse.SERVING)
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                messages = [message async for message in stub.Generate(ids_request(), timeout=60)]
                assert messages[-1].finished.usage.completion_tokens == 8
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
                answer = await http.post(f"{base}/v1/chat/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 3
                body["max_tokens"] = 10**7
                assert (await http.post(f"{base}/v1/chat/completions", json=body)).status_code == 400
                figures = await http.get(f"http://127.0.0.1:{metrics}/metrics")
                for series in (
                    'deepmesh_gateway_requests_total{api="openai",model="oracle",outcome="finished"} 1.0',
                    'deepmesh_gateway_accepted_total{api="openai",tenant="everyone"} 1.0',
                    'deepmesh_http_responses_total{path="/v1/chat/completions",status="200"} 1.0',
                    'deepmesh_gateway_refusals_total{api="openai",reason="context_exceeded",tenant="everyone"} 1.0',
                    'vllm:e2e_request_latency_seconds_count{model_name="oracle"} 2.0',
                    'vllm:generation_tokens_total{model_name="oracle"} 11.0',
                ):
                    assert series in figures.text, series
                assert psutil.Process(process.pid).memory_info().rss < 150e6
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 60) == 0
            assert process.stderr is not None
            lines = (await process.stderr.read()).decode()
            assert "generation tenant=everyone api=openai outcome=finished request_id=" in lines
            assert "generation tenant=everyone api=openai outcome=context_exceeded ms=" in lines


async def test_a_signal_ends_readiness_first_and_then_streams() -> None:
    scheduler, worker = FakeScheduler(), FakeDecodeWorker(step_seconds=0.02)
    models = f'models=[{{"tokenizer_dir": "{tokenizer_directory()}", "name": "oracle"}}]'
    body = {"model": "oracle", "prompt": "abc", "max_tokens": 3000, "stream": True}
    async with scheduler.server() as server, worker.started():
        scheduler.add(worker.identity())
        stop = ("balancer_seconds=0.5", "server.drain_seconds=0.3")
        async with (
            running_gateway(f"scheduler=127.0.0.1:{server.port}", models, *stop) as (process, grpc_port, http_port),
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as http,
        ):
            await until_health(channel, health_pb2.HealthCheckResponse.SERVING)
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                process.terminate()
                await until_health(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
                # A balancer that has not seen it yet is served.
                assert (await http.get("/health")).status_code == 503
                assert (await http.post("/v1/completions", json={**body, "max_tokens": 3})).status_code == 200
                events = [line async for line in lines if line]
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert events[-1] == "data: [DONE]"
            assert await asyncio.wait_for(process.wait(), 60) == 0
            assert process.stderr is not None
            assert b"Traceback" not in await process.stderr.read()


async def test_a_taken_http_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, lines = await run_to_its_end(f"http.port={port}")
    assert status == 2
    assert len(lines) == 1
    assert f"cannot listen on 127.0.0.1:{port} for HTTP" in lines[0]
    assert "http.port" in lines[0]


async def test_a_model_without_a_tokenizer_file_is_one_clear_line(tmp_path: Path) -> None:
    status, lines = await run_to_its_end(f'models=[{{"tokenizer_dir": "{tmp_path}"}}]')
    assert status == 2
    assert lines == [f"gateway: {tmp_path} has no tokenizer: expected tokenizer.json or tiktoken.model"]


def test_the_shipped_configuration_is_valid() -> None:
    config = load(GatewayConfig, ROOT / "configs/gateway.yaml")
    assert (config.http.port, config.server.port, config.scheduler) == (8000, 8001, "127.0.0.1:8002")


@pytest.mark.parametrize(
    "setting",
    [
        "limits.unread_token=5",
        "api_keys=[{name: a, key: same-secret}, {name: b, key: same-secret}]",
        "models=[{tokenizer_dir: /x/m}, {tokenizer_dir: /y/m}]",
    ],
)
def test_a_wrong_configuration_is_refused(setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=key.partition(".")[0]):
        load(GatewayConfig, None, [f"scheduler={NOWHERE}", setting])


def test_keys_do_not_show_in_a_printed_configuration() -> None:
    config = load(GatewayConfig, None, [f"scheduler={NOWHERE}", "api_keys=[{name: a, key: very-secret}]"])
    assert "very-secret" not in repr(config)
    assert "very-secret" not in yaml.safe_dump(config.model_dump(mode="json"))
