"""Prompts whose clients leave, and workers that are slow, while KV is on its way. An oracle's next token follows from
the KV that it has, so that a block with another request's would show.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
import pytest_asyncio

from engine.oracle.tokens import oracle_tokens
from tests.support.mesh_requests import (
    ANSWER_SECONDS,
    Call,
    assert_right,
    kill,
    nothing_lands,
    prompt_of,
    request_of,
    stored_blocks,
    suspended,
    until_a_landing_is_open,
    until_stored,
)
from tests.support.process_mesh import SLOW_STORE, VOCABULARY, ProcessMesh, oracle_settings, process_mesh

PROMPT_TOKENS = 512
# No block comes back by a deadline of KV here before a test gives up.
LANDING_SECONDS = 120
SETTINGS = (
    *oracle_settings(**{"oracle.step_ms": 2, "oracle.prefill_tokens_per_second": 20000}),
    *SLOW_STORE,
    "decode.can_prefill=false",
    f"decode.engine.transfer.landing_seconds={LANDING_SECONDS}",
    "scheduler.store_link.poll_seconds=0.1",
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[ProcessMesh]:
    """1P1D and a store."""
    async with process_mesh(prefill=1, stores=1, settings=SETTINGS) as running:
        yield running


async def abandoned(mesh: ProcessMesh, prompt: list[int], seconds: float) -> None:
    """Ask, and leave after some time."""
    call = mesh.gateway.Generate(request_of(prompt, 40), timeout=ANSWER_SECONDS)
    await asyncio.sleep(seconds)
    await leave(call)


async def leave(call: Call) -> None:
    call.cancel()
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call.read()


async def drained_seconds(mesh: ProcessMesh) -> float:
    began_at = time.monotonic()
    await mesh.drained()
    return time.monotonic() - began_at


async def test_aborts_in_mid_transfer_mix_up_no_requests_kv(pair: ProcessMesh) -> None:
    """https://github.com/vllm-project/vllm/issues/52234: a stale reference gave the previous prompt's answer, with 200.

    https://github.com/sgl-project/sglang/pull/35360: a late write landed in the pages of the next request.
    """
    source = random.Random(7)
    left = [prompt_of(PROMPT_TOKENS, 100 + number) for number in range(60)]
    kept = [prompt_of(PROMPT_TOKENS, 200 + number) for number in range(8)]
    storm = (abandoned(pair, prompt, source.uniform(0, 1)) for prompt in left)
    await asyncio.gather(*storm, assert_right(pair, kept))
    assert await drained_seconds(pair) < LANDING_SECONDS / 4
    # The same prompts again, a part of whose blocks may have landed, and others in the blocks that came free.
    await assert_right(pair, [*left[:8], *(prompt_of(PROMPT_TOKENS, 300 + number) for number in range(8))])


async def test_a_thousand_aborts_at_once_hold_no_slot(pair: ProcessMesh) -> None:
    """https://github.com/sgl-project/sglang/pull/28651: after an abort storm each decode slot waited for 300 s.

    https://github.com/vllm-project/vllm/pull/29906: prompts aborted as they ended held their KV for 5 minutes.
    """
    prompts = [prompt_of(65, 1_000 + number) for number in range(1_000)]
    with suspended(pair, "prefill-0"):
        calls = [pair.gateway.Generate(request_of(prompt, 40), timeout=ANSWER_SECONDS) for prompt in prompts]
        await until_a_landing_is_open(pair)
    await asyncio.gather(*map(leave, calls))
    assert await drained_seconds(pair) < LANDING_SECONDS / 4
    await assert_right(pair, [prompt_of(PROMPT_TOKENS, 400)])


async def test_a_client_gone_between_prefill_and_decode_leaves_nothing(pair: ProcessMesh) -> None:
    """https://github.com/vllm-project/vllm/issues/50425: the prefill worker kept such a prompt's KV.

    https://github.com/llm-d/llm-d/pull/1138: the docs name the window, and a timeout that ends it.
    """
    # The suspended decode worker hears of no abort.
    async with nothing_lands(pair, prompt_of(8_000, 500), 40) as (call, _):
        call.cancel()
    assert await drained_seconds(pair) < LANDING_SECONDS / 4


async def test_a_restarted_store_costs_no_token(pair: ProcessMesh) -> None:
    """https://github.com/kvcache-ai/Mooncake/issues/2246: after a restart, peers went on to ask for what was gone.

    https://github.com/kvcache-ai/Mooncake/issues/2704: a store that failed stayed listed, and requests failed with it.
    """
    prompts = [prompt_of(PROMPT_TOKENS, 600 + number) for number in range(4)]
    before = await stored_blocks(pair)
    await assert_right(pair, prompts)
    await until_stored(pair, before + 8)
    kill(pair, "kvstore-0", "prefill-0")
    await assert_right(pair, prompts)
    await pair.whole()
    await assert_right(pair, prompts)


@pytest.mark.check("faults")
async def test_a_decode_worker_slower_than_any_lease_gets_right_kv() -> None:
    """https://github.com/vllm-project/vllm/issues/21570: prefill released its blocks in time, and decode read them."""
    settings = (*SETTINGS, "decode.engine.transfer.landing_seconds=1", "prefill.engine.transfer.landing_seconds=1")
    async with process_mesh(prefill=1, settings=settings) as mesh:
        prompts = [prompt_of(PROMPT_TOKENS, 700 + number) for number in range(8)]
        for seconds in (0.5, 1.5, 4.0):
            answers = [asyncio.create_task(answer(mesh, prompt)) for prompt in prompts]
            await asyncio.sleep(0.05)
            with suspended(mesh, "decode-0"):
                await asyncio.sleep(seconds)
            assert await asyncio.gather(*answers) == [oracle_tokens(prompt, 40, VOCABULARY) for prompt in prompts]


async def answer(mesh: ProcessMesh, prompt: list[int]) -> list[int]:
    call = mesh.gateway.Generate(request_of(prompt, 40), timeout=ANSWER_SECONDS)
    return [token async for message in call for token in message.delta.token_ids]
