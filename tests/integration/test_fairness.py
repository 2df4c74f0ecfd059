"""A quiet tenant and a busy one, in a mesh of real processes. It measures time and is therefore not in `make
test`.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from statistics import median

import pytest

from tests.support.mesh_requests import prompt_of, request_of
from tests.support.process_mesh import ProcessMesh, oracle_settings, process_mesh

KEYS = 'gateway.api_keys=[{"name": "busy", "key": "busy-secret"}, {"name": "quiet", "key": "quiet-secret"}]'
QUEUED = 500
PROBES = 20
PAUSE_SECONDS = 0.2
# A prompt takes 50 ms. A first token waits for the step under way and comes with the next one.
PROMPT_TOKENS = 1000


async def first_token_seconds(mesh: ProcessMesh, key: str, prompt: Sequence[int], max_tokens: int) -> float:
    started = time.perf_counter()
    call = mesh.gateway.Generate(
        request_of(prompt, max_tokens), metadata=(("authorization", f"Bearer {key}"),), timeout=300
    )
    first = 0.0
    async for message in call:
        if message.delta.token_ids and not first:
            first = time.perf_counter() - started
    return first


async def probes(mesh: ProcessMesh, seed: int) -> list[float]:
    """Send a quiet tenant's requests now and then, each with a prompt of its own; returns times to the first token."""
    seconds = []
    for number in range(PROBES):
        await asyncio.sleep(PAUSE_SECONDS)
        prompt = prompt_of(PROMPT_TOKENS, 1000 * seed + number)
        seconds.append(await first_token_seconds(mesh, "quiet-secret", prompt, 4))
    return seconds


async def until_waiting(mesh: ProcessMesh, requests: int) -> None:
    async with asyncio.timeout(60):
        while True:
            if sum(worker.load.waiting_requests for worker in await mesh.workers()) >= requests:
                return
            await asyncio.sleep(0.1)


@pytest.mark.check("fairness")
@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_quiet_tenants_first_token_takes_twice_its_time(prefill: int) -> None:
    settings = oracle_settings(
        **{"oracle.step_ms": 15, "oracle.prefill_tokens_per_second": 20_000, "max_requests": 16, "total_blocks": 1024}
    )
    async with process_mesh(prefill=prefill, settings=(*settings, KEYS), api_key="quiet-secret") as mesh:
        alone = await probes(mesh, 1)
        busy = [
            asyncio.create_task(first_token_seconds(mesh, "busy-secret", prompt_of(100, number), 200))
            for number in range(QUEUED)
        ]
        await until_waiting(mesh, QUEUED - 100)
        loaded = await probes(mesh, 2)
        left = sum(not task.done() for task in busy)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await mesh.drained()
    # These figures are for the page on failures.
    sys.stdout.write(
        f"\nfirst token of a quiet tenant, prefill workers {prefill}: alone {1000 * median(alone):.1f} ms (longest "
        f"{1000 * max(alone):.1f}), with {left} requests of another {1000 * median(loaded):.1f} ms (longest "
        f"{1000 * max(loaded):.1f})\n"
    )
    assert left > QUEUED / 2
    assert median(loaded) <= 2 * median(alone)
