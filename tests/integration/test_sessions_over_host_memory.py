"""Sessions whose KV is many times the workers' pools, over host memory: every token is that of the oracle's definition,
whoever is killed meanwhile.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.oracle.tokens import oracle_tokens
from tests.support.mesh_requests import ANSWER_SECONDS, kill, prompt_of, request_of, tokens_of
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSIONS, TURNS, ANSWER_TOKENS = 24, 5, 40
# The sessions end with some 24 * 12 blocks: each pool holds a tenth of them, and is too small for all that run at once.
SETTINGS = (
    *oracle_settings(
        **{"oracle.step_ms": 2, "total_blocks": 30, "max_requests": 8, "host_blocks": 400, "drafts.next_n": 1}
    ),
    "scheduler.lease.seconds=2",
    "decode.grace_seconds=2",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[ProcessMesh]:
    async with process_mesh(workers=2, prefill=1, settings=SETTINGS) as running:
        yield running


async def copied_blocks(mesh: ProcessMesh) -> tuple[int, int]:
    """Blocks that live workers have written to host memory, and read from it."""
    tiers = [worker.load.host_tier for worker in await mesh.workers()]
    return sum(tier.written_blocks for tier in tiers), sum(tier.read_blocks for tier in tiers)


async def talk(mesh: ProcessMesh, session: int) -> None:
    """One session: each prompt repeats all that was said."""
    source = random.Random(session)
    said = prompt_of(source.randint(100, 400), session)
    for turn in range(TURNS):
        answer = await tokens_of(mesh, said, ANSWER_TOKENS)
        assert answer == oracle_tokens(said, ANSWER_TOKENS, VOCABULARY)
        said += answer + prompt_of(source.randint(10, 60), 1000 * session + turn)


async def test_sessions_find_in_host_memory_what_pools_evicted(mesh: ProcessMesh) -> None:
    # Known before any request.
    assert [worker.load.host_tier.total_blocks for worker in await mesh.workers()] == [400, 400, 400]
    await asyncio.gather(*(talk(mesh, session) for session in range(SESSIONS)))
    written, read = await copied_blocks(mesh)
    assert written > SESSIONS
    assert read > SESSIONS
    await mesh.drained()


async def test_usage_tells_what_came_from_host_memory(mesh: ProcessMesh) -> None:
    before, found = prompt_of(600, 7001), 0
    # Requests of other prompts push this one's blocks out of the pools.
    for seed in range(8):
        await asyncio.gather(*(tokens_of(mesh, prompt_of(600, 7100 + 100 * seed + each), 2) for each in range(10)))
        call = mesh.gateway.Generate(request_of(before, 2), timeout=ANSWER_SECONDS)
        usage = [message.finished.usage async for message in call if message.HasField("finished")][-1]
        assert usage.host_cached_tokens <= usage.cached_tokens
        found += usage.host_cached_tokens
    assert found


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_a_worker_killed_while_it_writes_costs_no_token(mesh: ProcessMesh, victim: str) -> None:
    await mesh.whole()
    before, _ = await copied_blocks(mesh)
    first = SESSIONS * (1 + ["decode-0", "prefill-0"].index(victim))
    sessions = asyncio.gather(*(talk(mesh, session) for session in range(first, first + SESSIONS)))

    async def writes() -> bool:
        return (await copied_blocks(mesh))[0] > before

    await eventually(writes)
    kill(mesh, victim)
    await sessions
    await mesh.whole()
    await mesh.drained()


THOUSANDS, AT_ONCE, SECONDS_BETWEEN_KILLS = 2000, 32, 5.0


@pytest.mark.check("host-memory")
async def test_thousands_of_sessions_are_exact_under_kills(mesh: ProcessMesh) -> None:
    room, kills = asyncio.Semaphore(AT_ONCE), 0

    async def talk_in_turn(session: int) -> None:
        async with room:
            await talk(mesh, session)

    async def kill_forever() -> None:
        nonlocal kills
        source = random.Random(41)
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_KILLS)
            await mesh.whole()
            kill(mesh, source.choice(["decode-0", "decode-1", "prefill-0"]))
            kills += 1

    await mesh.whole()
    killing = asyncio.create_task(kill_forever())
    await asyncio.gather(*(talk_in_turn(session) for session in range(THOUSANDS, 2 * THOUSANDS)))
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)
    await mesh.whole()
    await mesh.drained()
    sys.stdout.write(f"\n{THOUSANDS} sessions, {kills} workers killed\n")
