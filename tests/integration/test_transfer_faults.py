"""A prefill worker is killed before, during and after its push, and a store freezes. Tokens are right, and nothing is
held afterwards.
"""

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from engine.oracle.tokens import oracle_tokens
from tests.support.mesh_requests import (
    ANSWER_SECONDS,
    assert_right,
    kill,
    nothing_lands,
    prompt_of,
    request_of,
    suspended,
    until_a_landing_is_open,
)
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh

PROMPT_TOKENS = 512
SETTINGS = (
    # A prompt takes half a second, so that a prefill worker killed in that time has pushed nothing.
    *oracle_settings(**{"oracle.step_ms": 5, "oracle.prefill_tokens_per_second": 1000}),
    "decode.can_prefill=false",
    "decode.engine.transfer.landing_seconds=3",
    "decode.grace_seconds=2",
    "scheduler.lease.seconds=2",
    "scheduler.store_link.poll_seconds=0.1",
    "kvstore.offer_seconds=1",
    # On a busy machine the prefill worker takes long to come back.
    "gateway.dispatch.worker_seconds=60",
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow_pair() -> AsyncIterator[ProcessMesh]:
    async with process_mesh(prefill=1, stores=1, settings=SETTINGS) as running:
        yield running


async def test_a_prefill_worker_killed_before_its_push_costs_no_token(slow_pair: ProcessMesh) -> None:
    with suspended(slow_pair, "prefill-0"):
        answer = asyncio.create_task(assert_right(slow_pair, [prompt_of(PROMPT_TOKENS, 0)], 20))
        await until_a_landing_is_open(slow_pair)
        assert not answer.done()
        kill(slow_pair, "prefill-0")
    await answer
    await slow_pair.whole()
    await slow_pair.drained()


async def test_a_prefill_worker_killed_before_its_kv_costs_no_token(slow_pair: ProcessMesh) -> None:
    prompt = prompt_of(PROMPT_TOKENS, 2)
    async with nothing_lands(slow_pair, prompt, 20) as (call, tokens):
        kill(slow_pair, "prefill-0")
    assert len(tokens) == 1
    async for message in call:
        tokens += message.delta.token_ids
    assert tokens == oracle_tokens(prompt, 20, VOCABULARY)
    await slow_pair.whole()
    await slow_pair.drained()


async def test_a_prefill_worker_killed_after_its_push_is_not_missed(slow_pair: ProcessMesh) -> None:
    prompt = prompt_of(PROMPT_TOKENS, 1)
    tokens: list[int] = []
    async for message in slow_pair.gateway.Generate(request_of(prompt, 200), timeout=ANSWER_SECONDS):
        before, tokens = len(tokens), [*tokens, *message.delta.token_ids]
        # The second token needs the prompt's KV: all of it has landed.
        if before < 2 <= len(tokens):
            kill(slow_pair, "prefill-0")
    assert tokens == oracle_tokens(prompt, 200, VOCABULARY)
    await slow_pair.whole()
    await slow_pair.drained()


async def test_a_store_that_freezes_past_its_deadlines_holds_nobody_up(slow_pair: ProcessMesh) -> None:
    prompts = [prompt_of(PROMPT_TOKENS, 10 + number) for number in range(4)]
    store = psutil.Process(slow_pair.supervisor.process_ids["kvstore-0"])
    store.suspend()
    try:
        await assert_right(slow_pair, prompts, 20)
        # Wait for longer than the offers under way may take.
        await asyncio.sleep(1.5)
    finally:
        store.resume()
    await slow_pair.whole()
    await slow_pair.drained()
