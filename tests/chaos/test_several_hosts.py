"""Faults drawn at random, one after another, at a mesh whose workers lie on several hosts. No token is lost, repeated
or changed, no request fails, and nothing is held afterwards.
"""

import asyncio
import os
import random
import sys
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest

from engine.oracle.tokens import oracle_tokens
from tests.support.hosts_mesh import WORKER, on_hosts
from tests.support.mesh_requests import prompt_of, tokens_of
from tests.support.network import Network, network, why_no_network
from tests.support.process_mesh import SLOW_STORE, VOCABULARY, ProcessMesh, oracle_settings, process_mesh

SEED = int(os.environ.get("DEEPMESH_CHAOS_SEED", "1"))
FAULTS = 25
# Requests under way at once, and the pause between two.
MOST, PAUSE_SECONDS = 12, 0.15
PREFILL = "prefill-0"
HOSTS = tuple(f"{worker}{host}" for worker in (WORKER, PREFILL) for host in ("", "-1", "-2"))
SITES = (*HOSTS, "decode-1", "scheduler", "gateway", "kvstore-0")
SETTINGS = (
    *oracle_settings(**{"oracle.step_ms": 5, "total_blocks": 512, "parallel.dp": 3}),
    *SLOW_STORE,
    "scheduler.lease.seconds=3",
    "gateway.dispatch.worker_seconds=120",
    "decode.grace_seconds=2",
    "decode.server.drain_seconds=3",
    "prefill.server.drain_seconds=3",
)
WHATS = ("kill", "stop", "freeze", "kill a rank", "freeze a rank", "lose 20%", "cut off", "part")
pytestmark = [
    pytest.mark.check("chaos"),
    pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}"),
]


class Faults:
    """Draws and causes faults of a few seconds."""

    def __init__(self, mesh: ProcessMesh, net: Network, source: random.Random) -> None:
        self._mesh = mesh
        self._net = net
        self._source = source

    async def pause(self) -> None:
        await asyncio.sleep(self._source.choice((0.3, 2.0, 6.0)))

    async def next(self) -> str:
        """Cause one; returns its name once it is over."""
        site, seconds = self._source.choice((*HOSTS, "decode-1")), self._source.choice((0.5, 2.0, 5.0, 9.0))
        what = self._source.choice(WHATS)
        if what == "part":
            other = self._source.choice([each for each in SITES if each != site])
            self._net.cut(site, other)
            self._net.cut(other, site)
            what = f"{what} from {other}"
        elif what == "cut off":
            self._net.cut(site)
            self._net.cut_towards(site)
        elif what == "lose 20%":
            self._net.lose(site, 20)
        else:
            # It may be starting again.
            with suppress(KeyError, IndexError, psutil.NoSuchProcess):
                await self._strike(what, psutil.Process(self._mesh.supervisor.process_ids[site]), seconds)
            return f"{what} {site}"
        await asyncio.sleep(seconds)
        self._net.heal()
        return f"{what} {site} for {seconds:g} s"

    async def _strike(self, what: str, service: psutil.Process, seconds: float) -> None:
        struck = self._source.choice(service.children()) if what.endswith("rank") else service
        if what.startswith("kill"):
            struck.kill()
        elif what == "stop":
            struck.terminate()
        else:
            struck.suspend()
            await asyncio.sleep(seconds)
            struck.resume()


async def answer(mesh: ProcessMesh, seed: int) -> float:
    """Returns the seconds that it took."""
    source, begun = random.Random(seed), time.monotonic()
    prompt, count = prompt_of(source.choice((3, 64, 200, 700)), seed), source.choice((10, 100, 250))
    assert await tokens_of(mesh, prompt, count) == oracle_tokens(prompt, count, VOCABULARY)
    return time.monotonic() - begun


async def keep_asking(mesh: ProcessMesh, over: asyncio.Event) -> list[float]:
    """Have up to MOST requests under way until `over` is set. Returns the seconds of all answers."""
    asked: list[asyncio.Task[float]] = []
    while not over.is_set():
        if sum(not task.done() for task in asked) < MOST:
            asked.append(asyncio.create_task(answer(mesh, 10_000 * SEED + len(asked))))
        await asyncio.sleep(PAUSE_SECONDS)
    return await asyncio.gather(*asked)


async def test_workers_on_several_hosts_under_random_faults() -> None:
    with network(SITES) as net:
        deployed = partial(on_hosts, hosts=3, workers=(WORKER, PREFILL), net=net)
        async with process_mesh(workers=2, prefill=1, stores=1, settings=SETTINGS, deployed=deployed) as mesh:
            faults, over = Faults(mesh, net, random.Random(SEED)), asyncio.Event()
            asking = asyncio.create_task(keep_asking(mesh, over))
            for _ in range(FAULTS):
                sys.stdout.write(f"\n{await faults.next()}")
                await faults.pause()
            over.set()
            seconds = await asking
            await mesh.whole(120)
    sys.stdout.write(f"\n{len(seconds)} answers, the longest after {max(seconds):.1f} s\n")
