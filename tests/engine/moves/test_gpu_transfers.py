"""KV between ranks that share one GPU, and between a rank on a GPU and others: tokens equal those of one engine."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from mesh.blocks import chain_hashes
from mesh.config import ObserveConfig
from mesh.domain.targets import StoreTarget
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.engines import submit_of
from tests.support.rank_pair import RankPair, rank_pair
from tests.support.rank_store import RankStore
from tests.support.ranks import running_rank, until_an_end
from tests.support.waiting import eventually
from transfer.config import TransferConfig

pytestmark = pytest.mark.gpu

LENGTHS = (1, 64, 65, 300, 700)


def settings_of(checkpoint: Path, *, device: str = "cuda", **settings: Any) -> EngineConfig:
    # In float32 rounding decides nothing: steps of other shapes draw the same tokens.
    transfer = {"slot_bytes": 1 << 16, "slots": 4, "fetch_seconds": 10.0, **settings.pop("transfer", {})}
    defaults: dict[str, Any] = {"dtype": "float32", "device": device, "total_blocks": 64, "max_requests": 16}
    return EngineConfig(model_dir=checkpoint, transfer=TransferConfig(**transfer), **(defaults | settings))


def _ended(pair: RankPair, requests: int) -> bool:
    return len(pair.transcript.ends) == requests


@pytest.mark.parametrize("layerwise_tokens", [128, 1 << 20])
@pytest.mark.parametrize("prefill_device", ["cuda", "cpu"])
async def test_a_gpu_decodes_what_another_process_computed(
    tmp_path: Path, layerwise_tokens: int, prefill_device: str
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny")
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    transfer = {"layerwise_tokens": layerwise_tokens}
    decode = settings_of(checkpoint, transfer=transfer, prefix_cache=False)
    prefill = settings_of(checkpoint, device=prefill_device, transfer=transfer, max_step_tokens=256)
    async with rank_pair(decode, prefill) as pair:
        for key, prompt in enumerate(prompts):
            pair.submit(submit_of(key, prompt, 30, remote_prefill=True))
        for key, prompt in enumerate(prompts, start=len(prompts)):
            pair.decode.submit(submit_of(key, prompt, 30))
        await eventually(lambda: len(pair.transcript.ends) == 2 * len(prompts), seconds=60)
        tokens = pair.transcript.token_ids
        assert [tokens[key] for key in range(5)] == [tokens[key] for key in range(5, 10)]
        assert len(pair.pushes) == 5 and not any(push.error for push in pair.pushes)


@pytest.mark.parametrize("map_stores", [False, True])
async def test_a_gpu_rank_fetches_what_another_offered_to_a_store(tmp_path: Path, map_stores: bool) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny")
    prompt = random_prompt(700)
    hashes = chain_hashes(prompt)
    config = settings_of(checkpoint, transfer={"map_stores": map_stores})
    assert config.transfer is not None
    async with running_rank(config) as first, running_rank(config) as second:
        namespace = first.ready.namespace
        piece_bytes = first.ready.block_bytes // namespace.layers
        store = RankStore(namespace, hashes, len(hashes), piece_bytes, config.transfer)
        try:
            first.submit(submit_of(1, prompt, 20))
            expected = await until_an_end(first)
            landed, pushed = await store.take_offer(first)
            assert landed.size_bytes == pushed.size_bytes == len(hashes) * first.ready.block_bytes
            second.attach_store(store.session(1, mappable=True))
            second.submit(submit_of(1, prompt, 20, fetch=StoreTarget("store", len(hashes))))
            found = await until_an_end(second)
            assert found.token_ids == expected.token_ids
            assert found.cached_tokens[1] == 64 * len(hashes)
            assert ("mapped" in store.agent.counters().sent_bytes) == map_stores
        finally:
            store.agent.close()


async def test_long_prompts_are_pushed_while_their_later_layers_compute(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=8)
    # A segment holds a layer of the whole prompt.
    transfer = {"layerwise_tokens": 512, "slot_bytes": 1 << 20, "slots": 8}
    settings = settings_of(checkpoint, transfer=transfer)
    observe = ObserveConfig(trace_file=tmp_path / "prefill.json")
    async with rank_pair(settings, settings, observe) as pair:
        for key, length in enumerate((200, 1500)):
            pair.submit(submit_of(key, random_prompt(length, key), 2, remote_prefill=True))
            await eventually(partial(_ended, pair, key + 1), seconds=60)
    events = json.loads((tmp_path / "prefill.rank.json").read_text())
    _, long_prompt = [event for event in events if event["name"] == "engine.collect"]
    pushes = [event for event in events if event["name"] == "kv.push" and event["args"]["layers"] < 8]
    early = [push["args"]["first_layer"] for push in pushes if push["ts"] < long_prompt["ts"] + long_prompt["dur"]]
    assert 0 in early
