"""Thousands of requests through workers of several ranks, of which one is killed or frozen every few seconds."""

import asyncio
import random
import sys
import time

import psutil
import pytest

from engine.oracle.tokens import oracle_tokens
from tests.support.mesh_requests import prompt_of, tokens_of
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh

REQUESTS = 4000
AT_ONCE = 60
ANSWER_TOKENS = 60
SECONDS_BETWEEN_FAULTS = 6.0
SETTINGS = (
    *oracle_settings(**{"oracle.step_ms": 5, "total_blocks": 512}),
    "prefill.engine.parallel.dp=2",
    "decode.engine.parallel.dp=4",
    "scheduler.lease.seconds=2",
    "decode.grace_seconds=2",
    "decode.engine.transfer.landing_seconds=3",
)


async def strike(mesh: ProcessMesh, source: random.Random) -> list[psutil.Process]:
    """Kill or freeze a random rank of a running worker; returns all ranks of that worker, which must end."""
    name = source.choice(["decode-0", "decode-1", "prefill-0"])
    ranks = psutil.Process(mesh.supervisor.process_ids[name]).children()
    if not ranks:
        return []
    source.choice([psutil.Process.kill, psutil.Process.suspend])(source.choice(ranks))
    return ranks


async def strike_forever(mesh: ProcessMesh, struck: list[psutil.Process]) -> None:
    source = random.Random(16)
    while True:
        await asyncio.sleep(SECONDS_BETWEEN_FAULTS)
        await mesh.whole()
        struck += await strike(mesh, source)


@pytest.mark.check("ranks")
async def test_thousands_of_requests_get_their_own_tokens_whichever_rank_dies() -> None:
    struck: list[psutil.Process] = []
    room = asyncio.Semaphore(AT_ONCE)

    async def ask(mesh: ProcessMesh, seed: int) -> None:
        prompt = prompt_of(random.Random(seed).choice([20, 100, 300, 700]), seed % 500)
        async with room:
            assert await tokens_of(mesh, prompt, ANSWER_TOKENS) == oracle_tokens(prompt, ANSWER_TOKENS, VOCABULARY)

    started = time.monotonic()
    async with process_mesh(workers=2, prefill=1, stores=1, settings=SETTINGS) as mesh:
        striking = asyncio.create_task(strike_forever(mesh, struck))
        await asyncio.gather(*(ask(mesh, seed) for seed in range(REQUESTS)))
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
        await mesh.whole()
        assert not any(process.is_running() for process in struck)
    seconds = time.monotonic() - started
    sys.stdout.write(f"\n{REQUESTS} requests in {seconds:.0f} s, {len(struck)} ranks of struck workers ended\n")
