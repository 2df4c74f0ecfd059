"""Processes that die, clients that hang up and peers that lie, in a mesh of real processes on the oracle backend: there
are right tokens or one clear error, and nothing is held afterwards."""

import asyncio
import json
import os
import random
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio
from deepmesh.v1 import gateway_pb2

from launcher.plan import HOST
from tests.support.mesh_requests import assert_right, kill, request_of, tokens_of
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
STARTED = "started, in seconds by phase"
FAST_LEASES = ("scheduler.lease.seconds=2", "decode.grace_seconds=2", "gateway.limits.stalled_seconds=5")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[ProcessMesh]:
    # With two drafts this is as fast as steps of 5 ms without drafts.
    settings = oracle_settings(**{"oracle.step_ms": 12, "drafts.next_n": 2, "parallel.dp": 2})
    async with process_mesh(workers=2, settings=(*settings, *FAST_LEASES)) as running:
        yield running


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCABULARY) for _ in range(source.randint(1, 300))] for _ in range(count)]


async def assert_serving(mesh: ProcessMesh) -> None:
    await assert_right(mesh, [[1, 2, 3]], 20)


async def test_many_requests_at_once_each_get_their_own_tokens(mesh: ProcessMesh) -> None:
    await assert_right(mesh, prompts(60), 50)
    await mesh.drained()


async def test_a_killed_worker_costs_no_token_of_its_requests(mesh: ProcessMesh) -> None:
    await mesh.whole()
    answers = asyncio.create_task(assert_right(mesh, prompts(20, seed=1), 300))
    await asyncio.sleep(0.5)
    kill(mesh, "decode-0")
    await answers
    await mesh.drained()


async def test_a_killed_rank_costs_no_token_of_its_requests(mesh: ProcessMesh) -> None:
    await mesh.whole()
    answers = asyncio.create_task(assert_right(mesh, prompts(20, seed=2), 300))
    await asyncio.sleep(0.5)
    killed, other = ranks_of(mesh, "decode-1")
    before = len(mesh.lines)
    killed.kill()
    await answers
    assert not other.is_running()
    await mesh.drained()
    # The process that follows it logs how long each phase of the start took.
    successor = f"decode-1 .*{STARTED}"
    await eventually(lambda: any(re.match(successor, line) for line in mesh.lines[before:]))
    # A machine that is busy enough may have another worker ended, and started, too.
    started = next(line for line in mesh.lines[before:] if re.match(successor, line))
    assert all(f" {phase}=" in started for phase in ("service", "process", "all"))


async def test_a_frozen_worker_costs_no_token_of_its_requests(mesh: ProcessMesh) -> None:
    await mesh.whole()
    answers = asyncio.create_task(assert_right(mesh, prompts(20, seed=3), 300))
    await asyncio.sleep(0.5)
    frozen = mesh.supervisor.process_ids["decode-0"]
    os.kill(frozen, signal.SIGSTOP)
    try:
        await answers
    finally:
        os.kill(frozen, signal.SIGCONT)
    await mesh.drained()


async def test_a_frozen_rank_is_ended_and_costs_no_token(mesh: ProcessMesh) -> None:
    await mesh.whole()
    answers = asyncio.create_task(assert_right(mesh, prompts(20, seed=4), 300))
    await asyncio.sleep(0.5)
    ranks = ranks_of(mesh, "decode-1")
    ranks[1].suspend()
    await answers
    # Answers may end on another worker before the last rank is reaped.
    await eventually(lambda: not any(rank.is_running() for rank in ranks))
    assert any("has made no progress for 4.5 s: its process does not run" in line for line in mesh.lines)
    await mesh.drained()


async def test_streams_outlive_a_restart_of_the_scheduler() -> None:
    # The gateway's snapshot lasts for one lease, and a restart on a busy machine takes seconds.
    settings = (*oracle_settings(**{"oracle.step_ms": 5}), "scheduler.lease.seconds=30")
    async with process_mesh(workers=1, settings=settings) as mesh:
        answer = asyncio.create_task(assert_right(mesh, [[7, 8, 9]], 400))
        await asyncio.sleep(0.3)
        kill(mesh, "scheduler")
        # Without a scheduler the gateway places from its last snapshot.
        await assert_serving(mesh)
        back = asyncio.create_task(mesh.whole())
        while not back.done():
            await assert_serving(mesh)
        await back
        await answer


async def test_a_deadline_of_one_millisecond_leaves_nothing_behind(mesh: ProcessMesh) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in mesh.gateway.Generate(request_of([1] * 200, 1000), timeout=0.001):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await mesh.drained()


async def test_clients_that_hang_up_free_their_blocks(mesh: ProcessMesh) -> None:
    for _ in range(10):
        call = mesh.gateway.Generate(request_of([1] * 200, 10_000), timeout=60)
        await call.read()
        await call.read()
        call.cancel()
    body = {"model": "oracle", "prompt": "abc", "max_tokens": 10_000, "stream": True}
    async with httpx.AsyncClient(base_url=mesh.http_url, timeout=60, trust_env=False) as client:
        for _ in range(10):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                await anext(response.aiter_lines())
    await mesh.drained()


async def test_a_client_that_never_reads_frees_its_blocks(mesh: ProcessMesh) -> None:
    # Log probabilities make a token large, so that the kernel's buffers fill within seconds.
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 16_000, "stream": True}
    with unread_post(mesh, "/v1/chat/completions", json.dumps({**body, "logprobs": True, "top_logprobs": 20})):

        async def is_answered() -> bool:
            return any(worker.load.running_requests for worker in await mesh.workers())

        await eventually(is_answered)
        # Draining within 60 s shows that the answer was cut off: whole it would take 80 s.
        await mesh.drained(seconds=60)


@contextmanager
def unread_post(mesh: ProcessMesh, path: str, body: str) -> Iterator[None]:
    """Send a request on a socket with a very small buffer, and read nothing."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((HOST, mesh.plan.http_port))
        head = f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        yield


async def test_a_body_of_fifty_megabytes_is_refused(mesh: ProcessMesh) -> None:
    body = b'{"model": "oracle", "prompt": "' + b"a" * 50_000_000 + b'"}'
    async with httpx.AsyncClient(base_url=mesh.http_url, timeout=60, trust_env=False) as client:
        response = await client.post("/v1/completions", content=body)
    assert response.status_code == 413
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        request = gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(text="a" * 50_000_000), max_tokens=1)
        async for _ in mesh.gateway.Generate(request, timeout=60):
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await assert_serving(mesh)


async def test_with_every_worker_gone_requests_end_with_unavailable() -> None:
    settings = oracle_settings(**{"oracle.step_ms": 5})
    patience = "gateway.dispatch.worker_seconds=2"
    async with process_mesh(workers=1, settings=(*settings, *FAST_LEASES, patience)) as mesh:
        answer = asyncio.create_task(tokens_of(mesh, [1, 2], 5000))
        await asyncio.sleep(0.5)
        # Kill every process that the supervisor starts again.
        while not answer.done():
            with suppress(ProcessLookupError, KeyError):
                kill(mesh, "decode-0")
            await asyncio.wait({answer}, timeout=0.3)
        error = answer.exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.UNAVAILABLE


def ranks_of(mesh: ProcessMesh, name: str) -> list[psutil.Process]:
    """The processes of a worker's ranks."""
    return psutil.Process(mesh.supervisor.process_ids[name]).children()
