"""Clients of the OpenAI API that hang up, send nothing or never read: the work stops, and nothing is left."""

import asyncio
import json

import psutil
import pytest

from gateway.config import HttpConfig, LimitsConfig
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import direct, running_mesh
from tests.support.openai_calls import CHAT, HELLO
from tests.support.waiting import PATIENCE_SECONDS, eventually


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_stops_the_work(stream: bool) -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        body = json.dumps({"messages": HELLO, "stream": stream, "max_tokens": 3000}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await eventually(lambda: mesh.worker.live_requests == 1)
        writer.close()
        await eventually(lambda: len(mesh.worker.cancelled) == 1)


async def test_a_client_that_disconnects_while_sending_its_body_leaves_nothing() -> None:
    async with running_mesh() as mesh:
        _, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        assert (await mesh.http.get("/health")).status_code == 200
        assert mesh.scheduler.queries == []


@direct
async def test_a_client_that_never_reads_is_cut_off() -> None:
    worker = FakeDecodeWorker(context_tokens=500_000, tokens_per_step=50)
    limits = LimitsConfig(unread_tokens=2000, stalled_seconds=1.0)
    async with running_mesh(worker, limits=limits) as mesh:
        body = json.dumps({"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port, limit=1024)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await eventually(lambda: len(worker.cancelled) == 1)
        await mesh.drained()
        ends = mesh.http_port, writer.get_extra_info("sockname")[1]
        await eventually(lambda: ends not in established())
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        writer.close()


def established() -> set[tuple[int, int]]:
    """The ports of this process's connections, its own first."""
    connections = psutil.Process().net_connections("tcp")
    return {(each.laddr.port, each.raddr.port) for each in connections if each.status == psutil.CONN_ESTABLISHED}


async def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    async with running_mesh(http=HttpConfig(body_seconds=0.1)) as mesh:
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
        assert b"504" in await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        writer.close()


async def test_a_request_over_its_deadline_times_out() -> None:
    limits = LimitsConfig(generation_seconds=0.2)
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01), limits=limits) as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, "max_tokens": 4000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
