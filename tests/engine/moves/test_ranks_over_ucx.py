"""Two rank processes, KV between them over UCX: disaggregated equals monolithic."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.oracle.tokens import oracle_tokens
from engine.protocol.messages import LandingOpened, StepResult
from mesh.config import ObserveConfig
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.engines import VOCABULARY, oracle_config, prompt_of, submit_of
from tests.support.rank_pair import RankPair, rank_pair
from tests.support.waiting import eventually
from transfer.config import TransferConfig
from worker.ranks.client import RankClient

pytestmark = pytest.mark.asyncio(loop_scope="module")


def transfer_config(**settings: Any) -> TransferConfig:
    return TransferConfig(**{"slot_bytes": 1 << 16, "slots": 4, **settings})


def oracle_settings(**settings: Any) -> EngineConfig:
    return oracle_config(**{"total_blocks": 600, "transfer": transfer_config(), **settings})


async def ended(pair: RankPair, keys: Collection[int]) -> None:
    await eventually(lambda: pair.transcript.ends.keys() >= set(keys))


async def assert_at_rest(pair: RankPair) -> None:
    def at_rest() -> bool:
        told = (pair.received, pair.sent)
        opened = [each.open_landings + each.open_pushes + each.total_slots - each.free_slots for each in told]
        last = [transcript.steps[-1].load for transcript in (pair.transcript, pair.prefilled)]
        return not any(opened) and all(load.free_blocks == 600 and not load.running_requests for load in last)

    await eventually(at_rest)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[RankPair]:
    async with rank_pair(oracle_settings(), oracle_settings(max_step_tokens=128)) as pair:
        yield pair


async def test_prompts_across_block_chunk_and_segment_boundaries_equal_monolithic(pair: RankPair) -> None:
    # A segment holds 128 blocks.
    lengths = [1, 64, 65, 128, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8193, 8300]
    prompts = {length: prompt_of(length, seed=length) for length in lengths}
    for length, prompt in prompts.items():
        pair.submit(submit_of(length, prompt, 70, remote_prefill=True))
    await ended(pair, prompts.keys())
    await assert_at_rest(pair)
    for length, prompt in prompts.items():
        assert pair.transcript.token_ids[length] == oracle_tokens(prompt, 70, VOCABULARY)
    assert sum(push.size_bytes for push in pair.pushes) == sum(512 * (-(-n // 64)) for n in lengths)
    assert sum(pair.received.received_bytes.values()) == sum(pair.sent.sent_bytes.values())


async def test_a_prefix_that_decode_holds_and_one_in_prefills_pool(pair: RankPair) -> None:
    prompt, first, second = prompt_of(2000, seed=1), 10_001, 10_002
    pair.submit(submit_of(first, prompt[:700], 5, remote_prefill=True))
    await ended(pair, [first])
    # A push's end may be told after the answer's.
    await assert_at_rest(pair)
    moved = sum(push.size_bytes for push in pair.pushes)
    pair.submit(submit_of(second, prompt, 70, remote_prefill=True))
    await ended(pair, [second])
    await assert_at_rest(pair)
    assert pair.transcript.token_ids[second] == oracle_tokens(prompt, 70, VOCABULARY)
    assert pair.transcript.cached_tokens[second] == 640
    assert sum(push.size_bytes for push in pair.pushes) - moved == (32 - 10) * 512


async def test_cancelled_requests_leave_nothing(pair: RankPair) -> None:
    keys = range(20_000, 20_040)
    for key in keys:
        pair.submit(submit_of(key, prompt_of(600, key), 50, remote_prefill=True))
        await asyncio.sleep(0.002)
        if key % 2:
            pair.decode.cancel(key - key % 7)
    await ended(pair, keys)
    await assert_at_rest(pair)
    for key in keys:
        tokens = pair.transcript.token_ids.get(key, [])
        assert tokens == oracle_tokens(prompt_of(600, key), len(tokens), VOCABULARY)


async def test_a_rank_that_waits_for_kv_sleeps() -> None:
    async with rank_pair(oracle_settings(), oracle_settings(oracle={"prefill_tokens_per_second": 100.0})) as pair:
        pair.submit(submit_of(1, prompt_of(100), 5, remote_prefill=True))
        await eventually(lambda: pair.received.open_landings == 1)
        before = cpu_seconds(pair.decode.process_id)
        await ended(pair, [1])
        assert cpu_seconds(pair.decode.process_id) - before < 0.1


def cpu_seconds(process_id: int) -> float:
    times = psutil.Process(process_id).cpu_times()
    return times.user + times.system


def model_settings(checkpoint: Path, **settings: Any) -> EngineConfig:
    transfer = transfer_config(**settings.pop("transfer", {}))
    return EngineConfig(model_dir=checkpoint, device="cpu", threads=1, total_blocks=64, transfer=transfer, **settings)


@dataclass
class Served:
    pair: RankPair
    # The prefill rank's trace.
    events: list[dict[str, Any]]


# The last two are pushed layer by layer.
PROMPTS = [random_prompt(length, seed=length) for length in (200, 1, 64, 65, 300, 700, 1500)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model has served each prompt twice: the first time, another process computed it."""
    directory = tmp_path_factory.mktemp("model")
    checkpoint = tiny_checkpoint(directory / "tiny", num_hidden_layers=5)
    # A segment holds a layer of the whole prompt.
    transfer = {"layerwise_tokens": 512, "slot_bytes": 1 << 20, "slots": 8}
    decode = model_settings(checkpoint, transfer=transfer, prefix_cache=False)
    prefill = model_settings(checkpoint, transfer=transfer, max_step_tokens=256)
    async with rank_pair(decode, prefill, ObserveConfig(trace_file=directory / "prefill.json")) as pair:
        for key, prompt in enumerate(PROMPTS):
            pair.submit(submit_of(key, prompt, 8, remote_prefill=True))
            pair.decode.submit(submit_of(len(PROMPTS) + key, prompt, 8))
            # The first is alone in its step.
            await ended(pair, [0])
        await ended(pair, range(2 * len(PROMPTS)))
    return Served(pair, json.loads((directory / "prefill.rank.json").read_text()))


async def test_a_model_decodes_what_another_process_computed(served: Served) -> None:
    tokens = served.pair.transcript.token_ids
    assert all(tokens[key] == tokens[len(PROMPTS) + key] for key in range(len(PROMPTS)))
    assert len(served.pair.pushes) == len(PROMPTS)


async def test_long_prompts_are_pushed_while_their_later_layers_compute(served: Served) -> None:
    steps = [event for event in served.events if event["name"] == "engine.step"]
    pushes = [event for event in served.events if event["name"] == "kv.push"]
    within = [[push["args"] for push in pushes if is_within(push, step)] for step in steps]
    assert within[0] == []
    assert any(push["first_layer"] == 0 and push["layers"] == 1 for step in within for push in step)


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
