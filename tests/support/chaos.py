"""A mesh that suffers a fault in some phase of its requests. Every token is compared, and nothing may be held
afterwards.
"""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
import httpx

from engine.oracle.tokens import oracle_tokens
from launcher.plan import ServiceSpec
from mesh.rpc.channel import OPTIONS
from tests.support.mesh_requests import prompt_of
from tests.support.network import Network
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.redis_process import RedisProcess
from tests.support.resuming_client import Answer, ResumingClient
from tests.support.separated_mesh import separated

# While a fault lasts, another request arrives every ARRIVAL_SECONDS, unless LATE_AT_ONCE of them have no answer yet. A
# machine that is busy with other work would otherwise fall behind through no fault of the mesh.
ARRIVAL_SECONDS = 0.5
LATE_AT_ONCE = 4
# Requests that arrive at once when the fault is over.
REQUESTS_AFTERWARDS = 4
# Longest waits once the fault is over: for all answers, and for the mesh to be whole again.
ANSWERED_SECONDS = 120.0
WHOLE_SECONDS = 60.0
# Lines of the processes' logs that are shown if a cell fails.
LINES_SHOWN = 300
# The sites of the network: the processes of the mesh, and Redis.
SITES = (
    "scheduler",
    "scheduler-1",
    "kvstore-0",
    "prefill-0",
    "decode-0",
    "decode-1",
    "gateway",
    "gateway-1",
    "redis",
)
SETTINGS = (
    *oracle_settings(**{"oracle.step_ms": 5, "max_requests": 16, "total_blocks": 1024}),
    "scheduler.lease.seconds=3",
    "decode.grace_seconds=2",
    "decode.server.drain_seconds=1",
)


@dataclass(frozen=True)
class Phase:
    """When a fault comes: `after_seconds` after `requests` requests were sent."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    after_seconds: float


PHASES = {
    # There are more requests than run at once.
    "queued": Phase(40, 64, 40, 0.1),
    # The KV of long prompts is on its way from the prefill worker.
    "mid-transfer": Phase(8, 2000, 40, 0.15),
    "mid-stream": Phase(12, 200, 200, 0.5),
    # The blocks of the prompts and of the first answers go to the store.
    "offering": Phase(12, 640, 20, 0.35),
}


@dataclass(frozen=True)
class ChaosMesh:
    """A prefill worker, two decode workers, a KV store with its index in Redis, two schedulers, two gateways."""

    mesh: ProcessMesh
    redis: RedisProcess
    client: ResumingClient


Strike: TypeAlias = Callable[[ChaosMesh], Awaitable[None]]


@dataclass
class Outcome:
    """What a fault did to the clients."""

    # Answers to requests that were under way when the fault came.
    answers: list[Answer] = field(default_factory=list)
    # Answers to requests that arrived while it lasted.
    late: list[Answer] = field(default_factory=list)
    # Answers to requests that arrived at once when it was over.
    after: list[Answer] = field(default_factory=list)
    # Seconds from its end until the mesh was whole.
    whole_seconds: float = 0.0

    def __str__(self) -> str:
        pauses = f"longest pause {_longest(self.answers):.1f} s"
        if self.late:
            slow = sum(answer.longest_pause > 1 for answer in self.late)
            pauses += f", {_longest(self.late):.1f} s of {len(self.late)} that came meanwhile ({slow} over 1 s)"
        resumed = sum(answer.resumed for answer in (*self.answers, *self.late, *self.after))
        pauses += f", {_longest(self.after):.1f} s afterwards"
        return f"{pauses}; {resumed} resumed; whole after {self.whole_seconds:.1f} s"


@asynccontextmanager
async def chaos_mesh(
    network: Network | None = None,
    *settings: str,
    deployed: Callable[[Sequence[ServiceSpec]], Sequence[ServiceSpec]] = list,
    redis_directory: Path | None = None,
) -> AsyncIterator[ChaosMesh]:
    """Run the mesh. With a `network`, each process is at the site of its name. `redis_directory`: see RedisProcess."""
    redis = RedisProcess(directory=redis_directory)
    if network is not None:
        redis = RedisProcess(network.address("redis"), network.inside("redis"))
        if deployed is list:
            deployed = partial(separated, network)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(redis.running())
        mesh = await stack.enter_async_context(
            process_mesh(
                workers=2,
                prefill=1,
                stores=1,
                schedulers=2,
                gateways=2,
                settings=(*SETTINGS, f"kvstore.index.redis_url={redis.url}", *settings),
                deployed=deployed,
            )
        )
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(endpoint, options=OPTIONS))
            for endpoint in mesh.gateway_endpoints
        ]
        yield ChaosMesh(mesh, redis, ResumingClient(channels))


async def run_cell(chaos: ChaosMesh, name: str, phase_name: str, strike: Strike, seed: int) -> None:
    """Strike in one phase, compare every token, and print the outcome."""
    chaos.mesh.lines.clear()
    try:
        outcome = await _run_cell(chaos, name, phase_name, strike, seed)
    except BaseException as error:
        error.add_note("\n".join(chaos.mesh.lines[-LINES_SHOWN:]))
        raise
    sys.stdout.write(f"{name} {phase_name}: {outcome}\n")
    sys.stdout.flush()


async def _run_cell(chaos: ChaosMesh, name: str, phase_name: str, strike: Strike, seed: int) -> Outcome:
    phase, source = PHASES[phase_name], random.Random(f"{seed} {name} {phase_name}")
    cell, outcome = f"{name} {phase_name}, seed {seed}", Outcome()
    asked = [asyncio.create_task(_ask(chaos, phase, source, number, cell)) for number in range(phase.requests)]
    await asyncio.sleep(phase.after_seconds * source.uniform(0.5, 1.5))
    struck = asyncio.ensure_future(strike(chaos))
    late: list[asyncio.Task[Answer]] = []
    for number in itertools.count():
        await asyncio.wait({struck}, timeout=ARRIVAL_SECONDS)
        if struck.done():
            break
        if sum(not each.done() for each in late) < LATE_AT_ONCE:
            late.append(asyncio.create_task(_ask(chaos, phase, source, number, cell)))
    struck.result()
    afterwards = [_ask(chaos, phase, source, number, cell) for number in range(REQUESTS_AFTERWARDS)]
    async with asyncio.timeout(ANSWERED_SECONDS):
        outcome.whole_seconds, outcome.answers, outcome.late, outcome.after = await asyncio.gather(
            until_serving(chaos.mesh), asyncio.gather(*asked), asyncio.gather(*late), asyncio.gather(*afterwards)
        )
    await chaos.mesh.drained()
    return outcome


async def _ask(chaos: ChaosMesh, phase: Phase, source: random.Random, number: int, cell: str) -> Answer:
    prompt = prompt_of(phase.prompt_tokens, source.randrange(2**31))
    answer = await chaos.client.ask(prompt, phase.answer_tokens, number % 2)
    assert answer.tokens == oracle_tokens(prompt, phase.answer_tokens, VOCABULARY), cell
    return answer


async def until_serving(mesh: ProcessMesh) -> float:
    """Wait until everything that was ended serves again; returns how many seconds that took."""
    began_at = time.monotonic()
    await mesh.whole(WHOLE_SECONDS)
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
        for url in mesh.http_urls:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get(f"{url}/health")).is_success:
                        break
                await asyncio.sleep(0.05)
    return time.monotonic() - began_at


def _longest(answers: Sequence[Answer]) -> float:
    return max(answer.longest_pause for answer in answers)
