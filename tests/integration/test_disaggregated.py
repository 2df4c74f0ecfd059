"""Prefill and decode workers and KV stores as real processes over UCX, on the oracle backend: tokens equal the oracle's
definition, and nothing is held anywhere afterwards."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest
import pytest_asyncio
from deepmesh.internal.v1 import scheduler_pb2

from mesh.rpc.failures import from_rpc_error
from tests.support.ipv6 import has_ipv6, over_ipv6
from tests.support.mesh_requests import (
    assert_right,
    fetched_blocks,
    forget,
    kill,
    prompt_of,
    received_bytes,
    request_of,
    stored_blocks,
    tokens_of,
    until_stored,
)
from tests.support.process_mesh import SLOW_STORE, ProcessMesh, oracle_settings, process_mesh
from tests.support.waiting import eventually

# Around the ends of blocks, of the prefill worker's chunks of 128, and of segments of a few blocks.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 511, 512, 513, 640)
# A prefill worker that does not report is given up, with its landings, after three seconds.
FAST_LEASES = (
    "decode.engine.transfer.landing_seconds=3",
    "scheduler.lease.seconds=2",
    "decode.grace_seconds=2",
    "kvstore.offer_seconds=3",
    "scheduler.store_link.poll_seconds=0.1",
)
# A prefill worker computes every prompt. Its pool and its chunks have other sizes than the decode worker's.
APART = ("decode.can_prefill=false", "prefill.engine.total_blocks=192", "prefill.engine.max_step_tokens=128")
pytestmark = pytest.mark.asyncio(loop_scope="module")


def settings(**engine: object) -> tuple[str, ...]:
    values = {"oracle.step_ms": 2, "oracle.prefill_tokens_per_second": 20000, **engine}
    return (*oracle_settings(**values), *FAST_LEASES, *SLOW_STORE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[ProcessMesh]:
    """1P1D and a store, over IPv6 where there is one."""
    deployed = over_ipv6 if has_ipv6() else list
    async with process_mesh(prefill=1, stores=1, settings=(*settings(), *APART), deployed=deployed) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four() -> AsyncIterator[ProcessMesh]:
    """2P2D and two stores."""
    async with process_mesh(workers=2, prefill=2, stores=2, settings=(*settings(), *APART)) as running:
        yield running


async def chosen(mesh: ProcessMesh, newest: int) -> list[scheduler_pb2.Candidate]:
    """The candidates that were chosen in the newest decisions."""
    response = await mesh.schedulers[0].ListDecisions(scheduler_pb2.ListDecisionsRequest(limit=newest))
    return [each for decision in response.decisions for each in decision.candidates if not each.rejected]


async def test_prompts_of_every_length_are_computed_elsewhere_and_continued_exactly(pair: ProcessMesh) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    await assert_right(pair, prompts)
    assert {(each.prefill_worker_id, each.worker_id) for each in await chosen(pair, len(prompts))} == {
        ("prefill-0", "decode-0")
    }
    await pair.drained()
    assert (await received_bytes(pair))["decode-0"] >= sum(len(prompt) * 8 for prompt in prompts)


async def test_many_prompts_at_once_find_their_way(pair: ProcessMesh) -> None:
    source = random.Random(1)
    shared = [prompt_of(200, 100 + number) for number in range(4)]
    tails = [prompt_of(source.randint(1, 300), 200 + number) for number in range(60)]
    await assert_right(pair, [source.choice(shared) + tail for tail in tails], max_tokens=10)
    await pair.drained()


async def test_what_both_workers_forgot_comes_from_the_store(pair: ProcessMesh) -> None:
    prompt = prompt_of(513, 1007)
    before = await stored_blocks(pair)
    await assert_right(pair, [prompt])
    await until_stored(pair, before + 8)
    await pair.drained()
    await forget(pair, "prefill-0", "decode-0")
    await assert_right(pair, [prompt])
    await pair.drained()
    assert await fetched_blocks(pair) == 8


async def test_only_the_uncached_rest_of_a_prompt_is_computed(
    pair: ProcessMesh,
) -> None:
    prompt = prompt_of(640, 1008)
    before = await stored_blocks(pair)
    await assert_right(pair, [prompt[:513]])
    await until_stored(pair, before + 8)
    await pair.drained()
    await forget(pair, "prefill-0", "decode-0")
    # Two blocks are computed again now. Six more are in the store, and the rest is nowhere.
    await assert_right(pair, [prompt[:129]])
    fetched = await fetched_blocks(pair)
    await assert_right(pair, [prompt])
    await pair.drained()
    assert await fetched_blocks(pair) - fetched <= 6


async def test_a_prefill_worker_killed_at_work_costs_no_token(pair: ProcessMesh) -> None:
    prompts = [prompt_of(500, 300 + number) for number in range(30)]
    answers = asyncio.create_task(assert_right(pair, prompts, 100))
    await asyncio.sleep(0.3)
    kill(pair, "prefill-0")
    await answers
    await pair.whole()
    await pair.drained()


async def test_a_decode_worker_killed_while_kv_lands_costs_no_token(pair: ProcessMesh) -> None:
    prompts = [prompt_of(500, 400 + number) for number in range(30)]
    answers = asyncio.create_task(assert_right(pair, prompts, 100))
    await asyncio.sleep(0.3)
    kill(pair, "decode-0")
    await answers
    await pair.whole()
    await pair.drained()


async def test_a_mesh_outlives_its_store_and_fills_it_again(pair: ProcessMesh) -> None:
    kill(pair, "kvstore-0")
    await assert_right(pair, [prompt_of(300, 500 + number) for number in range(10)])
    await pair.whole()
    await assert_right(pair, [prompt_of(513, 1009)])
    await until_stored(pair, 8)


async def test_two_workers_of_each_role_share_work_and_stores(four: ProcessMesh) -> None:
    source = random.Random(2)
    prompts = [prompt_of(source.choice(LENGTHS), 600 + number) for number in range(60)]
    await assert_right(four, prompts)
    placed = await chosen(four, len(prompts))
    assert set(Counter(each.prefill_worker_id for each in placed)) == {"prefill-0", "prefill-1"}
    assert set(Counter(each.worker_id for each in placed)) == {"decode-0", "decode-1"}
    await four.drained()
    assert all(any(tier.used_blocks for tier in store.tiers) for store in (await four.snapshot()).stores)


async def test_with_one_prefill_worker_killed_the_other_takes_its_prompts(four: ProcessMesh) -> None:
    answers = asyncio.create_task(assert_right(four, [prompt_of(500, 800 + number) for number in range(40)], 50))
    await asyncio.sleep(0.3)
    kill(four, "prefill-0")
    await answers
    await four.whole()
    await four.drained()


async def test_a_prefill_worker_that_freezes_costs_time_and_no_token(four: ProcessMesh) -> None:
    frozen = psutil.Process(four.supervisor.process_ids["prefill-0"])
    processes = [frozen, *frozen.children(recursive=True)]
    answers = asyncio.create_task(assert_right(four, [prompt_of(500, 900 + number) for number in range(20)], 50))
    await asyncio.sleep(0.2)
    for process in processes:
        process.suspend()
    try:
        await answers
    finally:
        for process in processes:
            process.resume()
    await four.whole()
    await four.drained()


async def test_clients_that_hang_up_while_kv_moves_leave_nothing(four: ProcessMesh) -> None:
    source = random.Random(3)
    calls = [four.gateway.Generate(request_of(prompt_of(640, 1100 + number), 100)) for number in range(30)]
    for call in calls:
        await asyncio.sleep(source.uniform(0, 0.03))
        call.cancel()
    await four.drained()
    await assert_right(four, [prompt_of(200, 1200)])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.check("load")
async def test_thousands_of_requests_find_their_way() -> None:
    source = random.Random(4)
    shared = [prompt_of(source.randint(64, 400), 1300 + number) for number in range(20)]
    prompts = [source.choice(shared) + prompt_of(source.choice(LENGTHS[:12]), 2000 + number) for number in range(2000)]
    quick = {"oracle.step_ms": 0, "oracle.prefill_tokens_per_second": 0, "total_blocks": 2048}
    async with process_mesh(workers=2, prefill=2, stores=2, settings=(*settings(**quick), *APART[:1])) as mesh:
        for start in range(0, len(prompts), 200):
            await assert_right(mesh, prompts[start : start + 200], 20)
        assert {each.worker_id for each in await chosen(mesh, 1000)} == {"decode-0", "decode-1"}


@pytest.mark.check("load")
async def test_workers_of_two_namespaces_are_never_paired() -> None:
    other = "prefill.engine.oracle.vocabulary_size=513"
    async with process_mesh(prefill=1, settings=(*settings(), *APART, other)) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(mesh, prompt_of(100, 0), 40)
        error = from_rpc_error(caught.value)
        assert (error.code.name, error.reason) == ("FAILED_PRECONDITION", "NAMESPACE_MISMATCH")
        assert "weights_fingerprint oracle-512 against oracle-513" in error.message


@pytest.mark.check("load")
async def test_short_prompts_stay_on_a_decode_worker_that_computes_them() -> None:
    # 60 tokens take a prefill worker 30 ms, and ride in a decode step of 2. Before there was a step, the scheduler
    # assumes that one takes 20, and a first token comes sooner from an idle prefill worker.
    async with process_mesh(prefill=1, settings=settings(**{"oracle.prefill_tokens_per_second": 2000})) as mesh:

        async def has_measured() -> bool:
            (decode,) = [each for each in await mesh.workers() if each.identity.worker_id == "decode-0"]
            return decode.load.decode_step_ms > 0

        await assert_right(mesh, [prompt_of(600, 1)])
        await eventually(has_measured)
        await assert_right(mesh, [prompt_of(60, 0)])
        assert [each.prefill_worker_id for each in await chosen(mesh, 2)] == ["", "prefill-0"]
