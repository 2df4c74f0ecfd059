"""Prompts that prefill workers compute: a decode worker's calls, over loopback gRPC, with a rank that does as told."""

import pytest
from deepmesh.internal.v1 import targets_pb2
from deepmesh.v1 import common_pb2

from decode_svc import prefill_link
from engine.protocol.messages import FirstToken
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.outputs import Logprobs
from mesh.domain.sampling import Sampling
from mesh.errors import PlaceAgain, WorkerFull
from mesh.observe.metrics import DECODE_CACHED_TOKENS, DECODE_OUTPUT_TOKENS
from tests.support.decode_server import decode_without_rank, gateway_client
from tests.support.fake_prefill import fake_prefill
from tests.support.metric_values import value_of
from tests.support.prefill_calls import PROMPT, called, ended, rank_of, submitted, target
from tests.support.prefilling import make_ticket
from tests.support.waiting import eventually
from transfer.wire import ticket


async def test_a_prompt_is_sent_with_its_landing() -> None:
    done_before = ended("done")
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        rank, landing = rank_of(running), make_ticket(len(PROMPT), held_blocks=1)
        store = targets_pb2.StoreTarget(store_id="store-1", blocks=2)
        sampling = Sampling(temperature=0.5, seed=7, top_logprobs=1)
        fields = {"cache_salt": b"salt", "store": store, "attempt": 3, "prompt_tokens": 9}
        await gateway.submit(PROMPT, 10, sampling, prefill=target(prefill), **fields)
        await eventually(lambda: bool(rank.submitted))
        assert (rank.submitted[0].remote_prefill, rank.submitted[0].request.attempt, rank.submitted[0].fetch) == (
            True,
            3,
            None,
        )
        rank.open_landing(0, landing, held_blocks=1)
        call = await prefill.call()
        sent = call.request
        assert (list(sent.token_ids), sent.prompt_tokens, sent.held_blocks, sent.attempt) == (PROMPT, 9, 1, 3)
        assert (sent.request_id, sent.cache_salt, sent.store) == ("r1", b"salt", store)
        assert (sent.sampling.temperature, sent.sampling.seed, sent.sampling.top_logprobs) == (0.5, 7, 1)
        assert ticket(sent.ticket) == landing
        top = [common_pb2.TokenLogprob(token_id=42, logprob=-0.5)]
        logprobs = common_pb2.PositionLogprobs(logprob=-0.5, top=top)
        call.first_token(worker_cached_tokens=64, store_cached_tokens=64, logprobs=logprobs)
        call.answer(done={"pushed_bytes": 1024, "transport": "tcp"})
        call.end()
        await eventually(lambda: rank.first_tokens == [FirstToken(0, 42)])
        # Else the request may end before its call.
        await eventually(lambda: ended("done") == done_before + 1)
        rank.emit(rank.step(rank.output(0, 9, "length", [Logprobs(-0.5, [42], [-0.5])] * 9)))
        request = await gateway.ended(1)
        assert (request.error, len(request.tokens), len(request.logprobs)) == (None, 10, 10)
        assert not call.cancelled
    assert ended("done") == done_before + 1


async def test_a_first_token_goes_out_before_the_rank_knows() -> None:
    tokens_before, cached_before = value_of(DECODE_OUTPUT_TOKENS), value_of(DECODE_CACHED_TOKENS)
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill, sampling=Sampling(top_logprobs=1))
        top = [common_pb2.TokenLogprob(token_id=42, logprob=-0.5)]
        logprobs = common_pb2.PositionLogprobs(logprob=-0.5, top=top)
        cached = {"worker_cached_tokens": 64, "store_cached_tokens": 64, "host_cached_tokens": 32}
        call.first_token(**cached, logprobs=logprobs)
        request = gateway.requests[1]
        await gateway.until(lambda: request.tokens)
        assert (request.tokens, request.logprobs, request.cached_tokens) == ([42], [logprobs], 128)
        assert request.cached_by_tier == (32, 64)
        assert (request.ended, rank_of(running).steps) == (False, 0)
    assert value_of(DECODE_OUTPUT_TOKENS) - tokens_before == 1
    assert value_of(DECODE_CACHED_TOKENS) - cached_before == 128


async def test_a_first_token_outlives_a_broken_stream() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill)
        await gateway.break_stream()
        call.first_token()
        await eventually(lambda: bool(rank_of(running).first_tokens))
        await gateway.attach()
        await gateway.until(lambda: gateway.requests[1].tokens == [42])


async def test_a_prompt_that_the_rank_computes_is_not_sent() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        rank = rank_of(running)
        key = await submitted(running, gateway, prefill)
        rank.emit(rank.step(rank.output(key, 10, "length")))
        assert (await gateway.ended(1)).error is None
        assert not prefill.calls


async def test_a_prompt_computed_here_asks_the_store_itself() -> None:
    async with decode_without_rank() as running, gateway_client(running.endpoint) as gateway:
        rank = rank_of(running)
        await gateway.submit(PROMPT, 10, store=targets_pb2.StoreTarget(store_id="store-1", blocks=2))
        await eventually(lambda: bool(rank.submitted))
        fetch = rank.submitted[0].fetch
        assert fetch is not None
        assert (rank.submitted[0].remote_prefill, fetch.store_id, fetch.blocks) == (False, "store-1", 2)
        rank.emit(rank.step(rank.output(0, 10, "length")))
        await gateway.ended(1)


async def test_one_channel_serves_all_prompts_of_one_worker() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        calls = [await called(running, gateway, prefill) for _ in range(3)]
        assert len({call.peer for call in calls}) == 1
        for stream_id, call in enumerate(calls, 1):
            call.end(WorkerFull("full"))
            await gateway.ended(stream_id)


async def test_channels_of_workers_that_are_gone_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_link, "MAX_IDLE_CHANNELS", 1)
    async with decode_without_rank() as running, gateway_client(running.endpoint) as gateway:
        peers = []
        for stream_id in range(1, 4):
            async with fake_prefill() as prefill:
                call = await called(running, gateway, prefill, make_ticket(len(PROMPT), name=stream_id))
                call.end(WorkerFull("full"))
                await gateway.ended(stream_id)
                peers.append(call.peer)
        assert running.prefill_link.open_channels == 1


async def test_a_worker_without_prefill_sends_prompts_back() -> None:
    async with (
        decode_without_rank(can_prefill=False, engine={"transfer": {}}) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        assert not gateway.welcome.identity.can_prefill
        await gateway.submit(PROMPT, 10)
        assert type((await gateway.ended(1)).error) is PlaceAgain


async def test_blocks_of_the_landing_are_those_after_the_ones_held() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        key = await submitted(running, gateway, prefill)
        landing = make_ticket(len(PROMPT), held_blocks=2)
        rank_of(running).open_landing(key, landing, held_blocks=2)
        call = await prefill.call()
        blocks = sum(segment.block_count for segment in call.request.ticket.segments)
        assert (call.request.held_blocks, blocks) == (2, -(-len(PROMPT) // BLOCK_TOKENS) - 2)
        call.end(WorkerFull("full"))
        await gateway.ended(1)
