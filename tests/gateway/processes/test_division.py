"""Several processes of one gateway: `python -m gateway --set processes=2`."""

import asyncio
import re
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import psutil
import pytest
from deepmesh.v1 import gateway_pb2_grpc

from gateway.config import GatewayConfig, HttpConfig
from gateway.processes.division import Division
from gateway.processes.keeper import FIRST_PAUSE_SECONDS
from mesh.errors import ConfigError
from mesh.ports import free_port
from tests.support.addresses import NOWHERE
from tests.support.gateway_process import spawn
from tests.support.gateways import ids_request
from tests.support.waiting import eventually

LISTENING = re.compile(r"listening grpc_port=(\d+) http_port=(\d+)")
KEYS = "api_keys=[{name: alice, key: alice-secret, requests_per_minute: 4}]"
WAIT_SECONDS = 60.0


class Gateway:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.ports: list[tuple[int, int]] = []
        self.lines: list[str] = []

    @property
    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    @property
    def restarts(self) -> int:
        return sum("ended with -9: it is started again" in line for line in self.lines)

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode())
            if found := LISTENING.search(self.lines[-1]):
                self.ports.append((int(found[1]), int(found[2])))


@asynccontextmanager
async def two_processes(*settings: str) -> AsyncIterator[Gateway]:
    gateway = Gateway(await spawn("processes=2", *settings))
    reading = asyncio.create_task(gateway.read())
    try:
        await eventually(lambda: len(gateway.ports) == 2, WAIT_SECONDS)
        yield gateway
    finally:
        if gateway.process.returncode is None:
            gateway.process.kill()
        await gateway.process.wait()
        await reading


async def served_by(http_port: int) -> None:
    """One request over a connection of its own, which any of the processes may get."""
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"http://127.0.0.1:{http_port}/version", timeout=WAIT_SECONDS)).status_code == 200


async def served_calls(metrics_port: int) -> set[str]:
    """The processes that have answered something over HTTP."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=WAIT_SECONDS)).text
    return set(re.findall(r'deepmesh_http_responses_total\{path="/version",process="(\d)"', text))


async def refusal(grpc_port: int) -> grpc.StatusCode:
    """What a call for an unknown model gets, over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(
            ids_request(model="unknown"), metadata=(("authorization", "Bearer alice-secret"),), timeout=WAIT_SECONDS
        )
        return await call.code()


async def test_two_processes_share_a_port_counts_and_metrics() -> None:
    metrics_port = free_port()
    async with two_processes(f"server.metrics_port={metrics_port}", KEYS) as gateway:
        ((grpc_port, http_port),) = set(gateway.ports)
        # The kernel deals connections out at random.
        for _ in range(100):
            await served_by(http_port)
            if await served_calls(metrics_port) == {"0", "1"}:
                break
        assert await served_calls(metrics_port) == {"0", "1"}
        began_at = time.monotonic()
        codes = await asyncio.gather(*(refusal(grpc_port) for _ in range(20)))
        assert set(codes) == {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
        # A quarter of a minute brings another.
        assert 4 <= codes.count(grpc.StatusCode.NOT_FOUND) <= 4 + (time.monotonic() - began_at) / 15
        # As in a terminal, where Ctrl-C goes to the parent.
        gateway.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(gateway.process.wait(), WAIT_SECONDS) == 0


async def test_a_dead_process_is_started_again() -> None:
    async with two_processes() as gateway:
        first, second = gateway.children
        psutil.Process(first).kill()
        await eventually(lambda: len(gateway.ports) == 3, WAIT_SECONDS)
        assert gateway.restarts == 1
        await served_by(gateway.ports[0][1])
        children = gateway.children
        assert second in children and first not in children
        # One that stands still while the pause before the start is over starts it all the same.
        psutil.Process(second).kill()
        await eventually(lambda: gateway.restarts == 2, WAIT_SECONDS)
        gateway.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2 * FIRST_PAUSE_SECONDS)
        gateway.process.send_signal(signal.SIGCONT)
        await eventually(lambda: len(gateway.ports) == 4, WAIT_SECONDS)
        children = gateway.children
        gateway.process.kill()
        await eventually(lambda: not any(psutil.pid_exists(child) for child in children), WAIT_SECONDS)


async def test_a_process_that_cannot_start_ends_all_of_them() -> None:
    process = await spawn("processes=2", 'models=[{tokenizer_dir: "/nothing"}]')
    _, errors = await asyncio.wait_for(process.communicate(), WAIT_SECONDS)
    assert process.returncode == 2
    assert b"/nothing" in errors


def test_a_taken_port_is_found_before_forking() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = GatewayConfig(scheduler=NOWHERE, processes=2, http=HttpConfig(port=port))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            Division().divide(config)


def test_one_process_keeps_its_configuration() -> None:
    config, division = GatewayConfig(scheduler=NOWHERE), Division()
    assert division.divide(config) is config
