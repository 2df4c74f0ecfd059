"""Prompts computed by one worker and decoded with drafts by another, over real checkpoints in fp32."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.protocol.messages import LandingOpened
from engine.runner.backend import ModelBackend
from mesh.blocks import chain_hashes
from mesh.domain.sampling import DraftUse, Sampling
from mesh.domain.targets import StoreTarget
from mesh.errors import NamespaceMismatch
from tests.support.checkpoints import model_backend, random_prompt, tiny_checkpoint
from tests.support.disaggregation import Pair, assert_nothing_moves
from tests.support.eager_graphs import EagerGraphs
from tests.support.engines import Transcript, submit_of
from tests.support.fake_agent import Fabric, FakeAgent
from tests.support.remote_prompts import prefill_of
from transfer.config import TransferConfig

LENGTHS = (63, 64, 65, 150, 128)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(),
    Sampling(repetition_penalty=1.2),
    # This request's prompt fills its blocks exactly, so that the tokens computed again extend into the first token.
    Sampling(drafts=DraftUse.OFF),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def settings_of(next_n: int) -> dict[str, Any]:
    return {"max_step_tokens": 96, "max_requests": 8, "total_blocks": 32, "drafts": DraftsConfig(next_n=next_n)}


def moving(
    checkpoint: Path, fabric: Fabric, next_n: int, layerwise_tokens: int, graphs: EagerGraphs | None = None
) -> tuple[Engine, ModelBackend]:
    backend = model_backend(checkpoint, **settings_of(next_n))
    if graphs is not None:
        graphs.give_to(backend, [2, 8])
    transfer = TransferConfig(layerwise_tokens=layerwise_tokens)
    config = EngineConfig(model_dir=checkpoint, transfer=transfer, **settings_of(next_n))
    agent: Any = FakeAgent(backend.kv_memory(), backend.namespace, fabric, layerwise_tokens)
    return Engine(config, backend, time.monotonic, agent), backend


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> dict[int, list[int]]:
    """The tokens of one worker without drafts."""
    engine = Engine(
        EngineConfig(model_dir=checkpoint, **settings_of(0)),
        model_backend(checkpoint, **settings_of(0)),
        time.monotonic,
    )
    for submit in submits():
        engine.submit(submit)
    return Transcript().run(engine).token_ids


def submits(**settings: Any) -> list[Any]:
    pairs = zip(LENGTHS, SAMPLINGS, strict=True)
    return [
        submit_of(key, random_prompt(length, key), 10, sampling=sampling, ignore_eos=True, **settings)
        for key, (length, sampling) in enumerate(pairs)
    ]


def run_undisturbed(pair: Pair, undisturbed: dict[int, list[int]], **settings: Any) -> None:
    """Each prompt lands once, and all tokens are those of one worker without drafts."""
    for submit in submits(remote_prefill=True, **settings):
        pair.submit(submit)
    pair.run(random.Random(2))
    assert pair.transcript.token_ids == undisturbed
    assert len(pair.landings) == len(LENGTHS)
    assert_nothing_moves(pair)


@pytest.mark.parametrize("layerwise_tokens", [64, 1 << 30])
def test_landed_prompts_are_decoded_to_the_same_tokens_with_drafts(
    checkpoint: Path, undisturbed: dict[int, list[int]], layerwise_tokens: int
) -> None:
    fabric = Fabric(random.Random(1))
    decode, receiving = moving(checkpoint, fabric, 2, layerwise_tokens)
    prefill, sending = moving(checkpoint, fabric, 1, layerwise_tokens)
    pair = Pair(fabric, decode, prefill)
    run_undisturbed(pair, undisturbed)
    # The draft layer's KV of the longest prompt is what the prefill worker computed.
    whole = [block for step in pair.prefilled.steps for block in step.stored_blocks]
    for block in whole:
        (sent,), (landed,) = (engine.pool.match_prefix([block]) for engine in (prefill, decode))
        assert torch.equal(receiving.state.kv_pool[-1, landed], sending.state.kv_pool[-1, sent])


@pytest.mark.parametrize("next_n", [0, 1, 3])
def test_landed_prompts_go_on_in_graphs_to_the_same_tokens(
    checkpoint: Path, undisturbed: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, next_n: int
) -> None:
    fabric, graphs = Fabric(random.Random(1)), EagerGraphs(monkeypatch)
    decode, _ = moving(checkpoint, fabric, next_n, 64, graphs)
    prefill, _ = moving(checkpoint, fabric, 1, 64)
    run_undisturbed(Pair(fabric, decode, prefill), undisturbed)
    assert graphs.runs and not graphs.others


@pytest.mark.parametrize("next_n", [0, 1])
def test_a_tail_on_a_prefill_worker_is_pushed_from_graphs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, next_n: int
) -> None:
    fabric, graphs, prompt = Fabric(random.Random(1)), EagerGraphs(monkeypatch), random_prompt(134, 1)
    plain, _ = moving(checkpoint, fabric, 0, 1 << 30)
    plain.submit(submit_of(1, prompt, 10, ignore_eos=True))
    expected = Transcript().run(plain).token_ids
    decode, _ = moving(checkpoint, fabric, next_n, 64)
    prefill, _ = moving(checkpoint, fabric, next_n, 64, graphs)
    prefill.submit(submit_of(0, prompt[:129], 1))
    Transcript().run(prefill)
    graphs.others.clear()
    pair = Pair(fabric, decode, prefill)
    pair.submit(submit_of(1, prompt, 10, ignore_eos=True, remote_prefill=True))
    pair.run(random.Random(2))
    assert pair.transcript.token_ids == expected
    assert not graphs.others
    assert_nothing_moves(pair)


@pytest.mark.parametrize("layerwise_tokens", [64, 1 << 30])
def test_a_worker_with_drafts_pushes_what_the_other_has(
    checkpoint: Path, undisturbed: dict[int, list[int]], layerwise_tokens: int
) -> None:
    fabric = Fabric(random.Random(1))
    decode, receiving = moving(checkpoint, fabric, 0, layerwise_tokens)
    prefill, sending = moving(checkpoint, fabric, 2, layerwise_tokens)
    pair = Pair(fabric, decode, prefill)
    run_undisturbed(pair, undisturbed)
    assert receiving.state.kv_pool.shape[0] == sending.state.kv_pool.shape[0] - 1


@pytest.mark.parametrize("layerwise_tokens", [64, 1 << 30])
def test_a_worker_without_drafts_pushes_to_one_with_them(
    checkpoint: Path, undisturbed: dict[int, list[int]], layerwise_tokens: int
) -> None:
    fabric = Fabric(random.Random(1))
    decode, receiving = moving(checkpoint, fabric, 2, layerwise_tokens)
    receiving.state.kv_pool[-1] = 1.0
    prefill, sending = moving(checkpoint, fabric, 0, layerwise_tokens)
    pair = Pair(fabric, decode, prefill)
    run_undisturbed(pair, undisturbed, sender_draft_layers=0)
    landed = [block for step in pair.prefilled.steps for block in step.stored_blocks]
    for block in landed:
        (sent,), (taken,) = (engine.pool.match_prefix([block]) for engine in (prefill, decode))
        # The last token of a prompt is computed again.
        assert torch.equal(receiving.state.kv_pool[:-1, taken, :-1], sending.state.kv_pool[:, sent, :-1])
        # Nothing is left of another request's drafts.
        assert not receiving.state.kv_pool[-1, taken, :-1].any()
    # Blocks that are computed after draftless ones are draftless too.
    stored, draftless = (
        {block for step in pair.transcript.steps for block in getattr(step, field)}
        for field in ("stored_blocks", "draftless_blocks")
    )
    assert draftless == stored > set(landed)


def test_a_worker_refuses_landings_with_other_draft_layers(checkpoint: Path) -> None:
    fabric = Fabric(random.Random(1))
    decode, _ = moving(checkpoint, fabric, 2, 1 << 30)
    prefill, _ = moving(checkpoint, fabric, 0, 1 << 30)
    # The scheduler did not say how many draft layers the sender has.
    (submit, *_) = submits(remote_prefill=True)
    decode.submit(submit)
    decode.step()
    (opened,) = decode.transfers.drain_news()
    assert isinstance(opened, LandingOpened)
    prefill.submit(prefill_of(submit, opened, None))
    result = prefill.step()
    assert result is not None
    (output,) = result.outputs
    assert output.refusal is not None and output.refusal.reason == NamespaceMismatch.reason


def test_a_prompt_after_blocks_without_drafts_is_pushed_as_such(checkpoint: Path) -> None:
    fabric, prompt = Fabric(random.Random(1)), random_prompt(200, 1)
    plain, base = moving(checkpoint, fabric, 0, 1 << 30)
    plain.submit(submit_of(1, prompt, 10, ignore_eos=True))
    expected = Transcript().run(plain).token_ids
    for content in chain_hashes(prompt)[:2]:
        layers = base.state.kv_pool[:, plain.pool.match_prefix([content])]
        fabric.stored[content] = layers.contiguous().view(torch.uint8).numpy().tobytes()
    decode, _ = moving(checkpoint, fabric, 2, 1 << 30)
    prefill, _ = moving(checkpoint, fabric, 2, 1 << 30)
    pair = Pair(fabric, decode, prefill)
    pair.fetches[1] = StoreTarget("store", 2)
    pair.submit(submit_of(1, prompt, 10, ignore_eos=True, remote_prefill=True))
    pair.run(random.Random(2))
    assert pair.transcript.token_ids == expected
    assert pair.transcript.cached_tokens == {1: 128}
    for engine in (prefill, decode):
        assert engine.pool.drafts_end(engine.pool.match_prefix(chain_hashes(prompt))) == 0
    assert_nothing_moves(pair)


@pytest.mark.parametrize(("held", "fetched"), [(0, 1), (1, 2)])
def test_a_stored_prefix_gives_the_same_tokens_with_drafts(checkpoint: Path, held: int, fetched: int) -> None:
    fabric, prompt = Fabric(random.Random(1)), random_prompt(200, 1)
    first, stored = moving(checkpoint, fabric, 2, 1 << 30)
    first.submit(submit_of(1, prompt, 10, ignore_eos=True))
    expected = Transcript().run(first).token_ids
    for content in chain_hashes(prompt):
        layers = stored.state.kv_pool[:, first.pool.match_prefix([content])]
        fabric.stored[content] = layers.contiguous().view(torch.uint8).numpy().tobytes()
    second, _ = moving(checkpoint, fabric, 2, 1 << 30)
    second.submit(submit_of(0, prompt[: 64 * held + 1], 1))
    Transcript().run(second)
    second.submit(submit_of(1, prompt, 10, ignore_eos=True, fetch=StoreTarget("store", held + fetched)))
    transcript = Transcript()
    while second.has_work() or fabric.run_one():
        second.poll_transfers()
        transcript.record(second.step())
    assert (transcript.token_ids, transcript.cached_tokens) == (expected, {1: 64 * (held + fetched)})
