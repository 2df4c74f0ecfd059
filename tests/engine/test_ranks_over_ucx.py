"""Two rank processes, KV between them over UCX: disaggregated equals monolithic."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import EngineConfig
from engine.oracle_tokens import oracle_tokens
from engine.protocol.messages import LandingOpened, StepResult
from mesh.config import ObserveConfig
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.engines import VOCABULARY, oracle_config, prompt_of, submit_of
from tests.support.rank_pair import RankPair, rank_pair
from tests.support.waiting import eventually
from transfer.config import TransferConfig
from worker.rank_client import RankClient


def transfer_config(**settings: Any) -> TransferConfig:
    return TransferConfig(**{"slot_bytes": 1 << 16, "slots": 4, **settings})


def oracle_settings(**settings: Any) -> EngineConfig:
    return oracle_config(**{"total_blocks": 600, "transfer": transfer_config(), **settings})


async def ended(pair: RankPair, count: int) -> None:
    await eventually(lambda: len(pair.transcript.ends) == count)


async def assert_at_rest(pair: RankPair) -> None:
    def at_rest() -> bool:
        told = (pair.received, pair.sent)
        opened = [each.open_landings + each.open_pushes + each.total_slots - each.free_slots for each in told]
        last = [transcript.steps[-1].load for transcript in (pair.transcript, pair.prefilled)]
        return not any(opened) and all(load.free_blocks == 600 and not load.running_requests for load in last)

    await eventually(at_rest)


async def test_prompts_across_block_chunk_and_segment_boundaries_equal_monolithic() -> None:
    # A segment holds 128 blocks.
    lengths = [1, 64, 65, 128, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8193, 8300]
    prompts = {length: prompt_of(length, seed=length) for length in lengths}
    async with rank_pair(oracle_settings(), oracle_settings(max_step_tokens=1024)) as pair:
        for length, prompt in prompts.items():
            pair.submit(submit_of(length, prompt, 70, remote_prefill=True))
        await ended(pair, len(prompts))
        await assert_at_rest(pair)
        for length, prompt in prompts.items():
            assert pair.transcript.token_ids[length] == oracle_tokens(prompt, 70, VOCABULARY)
        assert sum(push.size_bytes for push in pair.pushes) == sum(512 * (-(-n // 64)) for n in lengths)
        assert sum(pair.received.received_bytes.values()) == sum(pair.sent.sent_bytes.values())


async def test_a_prefix_that_decode_holds_and_one_in_prefills_pool() -> None:
    prompt = prompt_of(2000)
    async with rank_pair(oracle_settings(), oracle_settings()) as pair:
        pair.submit(submit_of(1, prompt[:700], 5, remote_prefill=True))
        await ended(pair, 1)
        moved = sum(push.size_bytes for push in pair.pushes)
        pair.submit(submit_of(2, prompt, 70, remote_prefill=True))
        await ended(pair, 2)
        assert pair.transcript.token_ids[2] == oracle_tokens(prompt, 70, VOCABULARY)
        assert pair.transcript.cached_tokens[2] == 640
        assert sum(push.size_bytes for push in pair.pushes) - moved == (32 - 10) * 512


async def test_cancelled_requests_leave_nothing_behind() -> None:
    async with rank_pair(oracle_settings(), oracle_settings(max_step_tokens=128)) as pair:
        for key in range(40):
            pair.submit(submit_of(key, prompt_of(600, key), 50, remote_prefill=True))
            await asyncio.sleep(0.002)
            if key % 2:
                pair.decode.cancel(key - key % 7)
        await ended(pair, 40)
        await assert_at_rest(pair)
        for key, tokens in pair.transcript.token_ids.items():
            assert tokens == oracle_tokens(prompt_of(600, key), len(tokens), VOCABULARY)


async def test_a_rank_that_waits_for_kv_sleeps() -> None:
    async with rank_pair(oracle_settings(), oracle_settings(oracle={"prefill_tokens_per_second": 100.0})) as pair:
        pair.submit(submit_of(1, prompt_of(100), 5, remote_prefill=True))
        await eventually(lambda: pair.received.open_landings == 1)
        before = cpu_seconds(pair.decode.process_id)
        await ended(pair, 1)
        assert cpu_seconds(pair.decode.process_id) - before < 0.1


def cpu_seconds(process_id: int) -> float:
    times = psutil.Process(process_id).cpu_times()
    return times.user + times.system


def model_settings(checkpoint: Path, **settings: Any) -> EngineConfig:
    transfer = transfer_config(**settings.pop("transfer", {}))
    return EngineConfig(model_dir=checkpoint, device="cpu", threads=1, total_blocks=64, transfer=transfer, **settings)


@pytest.mark.parametrize("layerwise_tokens", [128, 1 << 20])
async def test_a_model_decodes_what_another_process_computed_as_if_it_had_computed_it(
    tmp_path: Path, layerwise_tokens: int
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny")
    prompts = [random_prompt(length, seed=length) for length in (1, 64, 65, 300, 700)]
    transfer = {"layerwise_tokens": layerwise_tokens}
    decode = model_settings(checkpoint, transfer=transfer, prefix_cache=False)
    prefill = model_settings(checkpoint, transfer=transfer, max_step_tokens=256)
    async with rank_pair(decode, prefill) as pair:
        for key, prompt in enumerate(prompts):
            pair.submit(submit_of(key, prompt, 30, remote_prefill=True))
        for key, prompt in enumerate(prompts, start=len(prompts)):
            pair.decode.submit(submit_of(key, prompt, 30))
        await ended(pair, 2 * len(prompts))
        tokens = pair.transcript.token_ids
        assert [tokens[key] for key in range(5)] == [tokens[key] for key in range(5, 10)]
        assert len(pair.pushes) == 5


async def test_long_prompts_are_pushed_while_their_later_layers_compute(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=8)
    # A segment holds a layer of the whole prompt.
    transfer = {"layerwise_tokens": 512, "slot_bytes": 1 << 20, "slots": 8}
    settings = model_settings(checkpoint, transfer=transfer)
    observe = ObserveConfig(trace_file=tmp_path / "prefill.json")
    async with rank_pair(settings, settings, observe) as pair:
        for key, length in enumerate((200, 1500)):
            pair.submit(submit_of(key, random_prompt(length, key), 2, remote_prefill=True))
            await ended(pair, key + 1)
    events = json.loads((tmp_path / "prefill.rank.json").read_text())
    steps = [event for event in events if event["name"] == "engine.step"]
    pushes = [event for event in events if event["name"] == "kv.push"]
    overlapping = [[push["args"]["first_layer"] for push in pushes if is_within(push, step)] for step in steps]
    assert overlapping[0] == []
    assert 0 in overlapping[1]


def is_within(event: dict[str, Any], other: dict[str, Any]) -> bool:
    return other["ts"] <= event["ts"] and event["ts"] + event["dur"] <= other["ts"] + other["dur"]


async def test_a_ticket_names_the_rank_that_its_landing_is_on() -> None:
    client = await RankClient.start(oracle_settings(transfer=transfer_config()), rank=3)
    try:
        client.submit(submit_of(1, prompt_of(500), 5, remote_prefill=True))
        opened = await anext(news async for news in client.results if isinstance(news, LandingOpened))
        places = {(segment.destination_rank, segment.worker_address) for segment in opened.ticket.segments}
        assert places == {(3, client.ready.transfer_address)}
    finally:
        await client.close(grace_seconds=30.0)


async def test_a_landing_that_nothing_reaches_ends_with_its_deadline() -> None:
    client = await RankClient.start(oracle_settings(transfer=transfer_config(landing_seconds=0.3, landing_token_ms=0)))
    try:
        client.submit(submit_of(1, prompt_of(500), 5, remote_prefill=True))
        outputs = []
        async for message in client.results:
            if isinstance(message, StepResult):
                outputs += message.outputs
                if outputs and message.load.free_blocks == 600:
                    break
        (lost,) = outputs
        assert lost.refusal is not None
        assert lost.refusal.reason == "PREFILL_LOST"
    finally:
        await client.close(grace_seconds=30.0)
