"""Engines over models that attend to selected tokens, against transformers in fp32: however a request is run."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.parallel.config import ParallelConfig
from engine.runner.backend import ModelBackend
from mesh.blocks import chain_hashes
from mesh.domain.targets import StoreTarget
from tests.support.checkpoints import model_backend, random_prompt, tiny_checkpoint
from tests.support.disaggregation import Pair, assert_nothing_moves
from tests.support.eager_graphs import EagerGraphs, give_prompt_graphs
from tests.support.engines import Transcript, assert_at_rest, submit_of
from tests.support.fake_agent import Fabric, FakeAgent
from tests.support.family import FAMILY
from tests.support.layouts import run_layout
from tests.support.oracle_model import assert_greedy, load_oracle_of_family
from transfer.config import TransferConfig

# On both sides of the 40 tokens that are selected, of a block's 64, and of chunks of 72.
LENGTHS = (1, 39, 40, 41, 64, 65, 73, 150)
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]
TOKENS = 10


@pytest.fixture(scope="module", params=["deepseek-v3.2", "glm-5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), **FAMILY[request.param])


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return load_oracle_of_family(checkpoint)


def settings_of(next_n: int, **settings: Any) -> dict[str, Any]:
    drafts = DraftsConfig(next_n=next_n)
    return {"max_step_tokens": 72, "max_requests": 8, "total_blocks": 32, "drafts": drafts, **settings}


def engine_over(checkpoint: Path, backend: ModelBackend, next_n: int, **settings: Any) -> Engine:
    config = EngineConfig(model_dir=checkpoint, **settings_of(next_n, **settings))
    return Engine(config, backend, time.monotonic)


def moving(checkpoint: Path, fabric: Fabric, next_n: int) -> tuple[Engine, ModelBackend]:
    backend = model_backend(checkpoint, **settings_of(next_n))
    config = EngineConfig(model_dir=checkpoint, transfer=TransferConfig(layerwise_tokens=64), **settings_of(next_n))
    agent: Any = FakeAgent(backend.kv_memory(), backend.namespace, fabric, 64)
    return Engine(config, backend, time.monotonic, agent), backend


def assert_as_transformers(reference: PreTrainedModel, token_ids: dict[int, list[int]]) -> None:
    for key, drawn in token_ids.items():
        assert len(drawn) == TOKENS
        assert_greedy(reference, PROMPTS[key], drawn)


def submit_all(engine: Engine | Pair, **settings: Any) -> None:
    for key, prompt in enumerate(PROMPTS):
        engine.submit(submit_of(key, prompt, TOKENS, ignore_eos=True, **settings))


@pytest.mark.parametrize("next_n", [0, 2])
def test_requests_that_run_together_match(checkpoint: Path, reference: PreTrainedModel, next_n: int) -> None:
    engine = engine_over(checkpoint, model_backend(checkpoint, **settings_of(next_n)), next_n)
    submit_all(engine)
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    assert_as_transformers(reference, transcript.token_ids)


def test_preempted_requests_match(checkpoint: Path, reference: PreTrainedModel) -> None:
    """Four requests that each grow from two blocks to three."""
    backend = model_backend(checkpoint, **settings_of(2, total_blocks=8))
    engine, prompts = engine_over(checkpoint, backend, 2, total_blocks=8), [random_prompt(96 + key) for key in range(4)]
    for key, prompt in enumerate(prompts):
        engine.submit(submit_of(key, prompt, 40, ignore_eos=True))
    transcript, preempted = Transcript(), False
    while engine.has_work():
        transcript.record(engine.step())
        started = len(transcript.token_ids) - len(transcript.ends)
        preempted = preempted or engine.load().running_requests < started
    assert_at_rest(engine)
    assert preempted
    for key, prompt in enumerate(prompts):
        assert_greedy(reference, prompt, transcript.token_ids[key])


@pytest.mark.parametrize("next_n", [0, 2])
def test_requests_in_captured_graphs_match(
    checkpoint: Path, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, next_n: int
) -> None:
    backend, graphs = model_backend(checkpoint, **settings_of(next_n)), EagerGraphs(monkeypatch)
    graphs.give_to(backend, [2, 8])
    pieces = give_prompt_graphs(backend, [32, 72])
    engine = engine_over(checkpoint, backend, next_n)
    submit_all(engine)
    assert_as_transformers(reference, Transcript().run(engine).token_ids)
    assert graphs.runs and pieces.runs


def test_prompts_that_land_and_prefixes_of_a_store_match(checkpoint: Path, reference: PreTrainedModel) -> None:
    fabric = Fabric(random.Random(1))
    (decode, receiving), (prefill, sending) = moving(checkpoint, fabric, 2), moving(checkpoint, fabric, 1)
    pair = Pair(fabric, decode, prefill)
    submit_all(pair, remote_prefill=True)
    pair.run(random.Random(2))
    assert_as_transformers(reference, pair.transcript.token_ids)
    assert_nothing_moves(pair)
    chain = chain_hashes(PROMPTS[-1])
    assert len(chain) == 2
    for content in chain:
        (sent,), (landed,) = (engine.pool.match_prefix([content]) for engine in (prefill, decode))
        for ours, theirs in zip(receiving.state.planes, sending.state.planes, strict=True):
            assert torch.equal(ours[:, landed], theirs[:, sent])
        pieces = torch.cat([plane[:, sent] for plane in sending.state.planes], dim=1)
        fabric.stored[content] = pieces.numpy().tobytes()
    other, _ = moving(checkpoint, fabric, 2)
    key = len(PROMPTS) - 1
    other.submit(submit_of(key, PROMPTS[-1], TOKENS, ignore_eos=True, fetch=StoreTarget("store", 2)))
    transcript = Transcript()
    while other.has_work() or fabric.run_one():
        other.poll_transfers()
        transcript.record(other.step())
    assert transcript.cached_tokens == {key: 128}
    assert_as_transformers(reference, transcript.token_ids)


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(tp=2), ParallelConfig(tp=1, dp=2, context_parallel_tokens=20, context_parallel_reach=2048)],
    ids=["tp", "cp"],
)
def test_two_ranks_match(checkpoint: Path, reference: PreTrainedModel, parallel: ParallelConfig) -> None:
    config = EngineConfig(
        model_dir=checkpoint, device="cpu", parallel=parallel, threads=1, **settings_of(2)
    )  # fmt: skip
    submits = [submit_of(key, PROMPTS[key], TOKENS, ignore_eos=True) for key in (3, len(PROMPTS) - 1)]
    assert_as_transformers(reference, run_layout(config, submits).token_ids)
