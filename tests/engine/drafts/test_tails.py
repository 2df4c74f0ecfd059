"""Tails of prompts after cached KV, as rows of graphs. Here the captured work runs eagerly on a CPU."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from engine.step.shape import StepShape
from engine.step.two_batch import ALWAYS, NEVER
from launcher.shipped_model import shipped_model
from mesh.blocks import chain_hashes
from mesh.domain.sampling import DraftUse, Sampling
from tests.support.checkpoints import model_backend, predictable_checkpoint, random_prompt
from tests.support.eager_graphs import EagerGraphs, note_others
from tests.support.engines import Transcript, assert_at_rest, submit_of

KNOWN = random_prompt(150)
# Tokens of each prompt after its two cached blocks.
TAILS = (1, 2, 3, 4, 22, 38)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1, top_p=0.95, top_logprobs=2),
    Sampling(temperature=0.5, seed=2, frequency_penalty=0.2, repetition_penalty=1.1),
    Sampling(drafts=DraftUse.OFF),
    Sampling(temperature=0.8, seed=4, presence_penalty=0.3),
    Sampling(),
]
TOKENS = 12


def settings_of(next_n: int, **settings: Any) -> dict[str, Any]:
    drafts = DraftsConfig(next_n=next_n)
    return {"drafts": drafts, "max_step_tokens": 192, "max_requests": 48, "total_blocks": 64, **settings}


def engine_over(backend: ModelBackend, next_n: int, **settings: Any) -> Engine:
    config = EngineConfig(model_dir=Path("checkpoint"), **settings_of(next_n, **settings))
    return Engine(config, backend, time.monotonic)


def submit_tails(engine: Engine, keys: Sequence[int]) -> None:
    for key in keys:
        prompt = [*KNOWN[:128], *random_prompt(TAILS[key], seed=1 + key)]
        engine.submit(submit_of(key, prompt, TOKENS, sampling=SAMPLINGS[key], ignore_eos=True))


def served(engine: Engine) -> Transcript:
    """Serve the known prompt, then prompts that begin like it: some together, others while requests decode."""
    engine.submit(submit_of(99, KNOWN, 1))
    transcript = Transcript().run(engine)
    submit_tails(engine, [0, 5])
    for _ in range(4):
        transcript.record(engine.step())
    submit_tails(engine, [1, 2])
    for _ in range(3):
        transcript.record(engine.step())
    submit_tails(engine, [3, 4])
    transcript.run(engine)
    assert_at_rest(engine)
    return transcript


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predictable_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def undisturbed(checkpoint: Path) -> Transcript:
    """The transcript without a cache, drafts and graphs."""
    return served(engine_over(model_backend(checkpoint, **settings_of(0)), 0, prefix_cache=False))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Transcript:
    return undisturbed(checkpoint)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(("next_n", "sizes"), [(0, [8, 100]), (1, [4, 48]), (3, [4, 48])])
def test_steps_after_cached_kv_are_graphs_and_change_no_token(
    checkpoint: Path, expected: Transcript, monkeypatch: pytest.MonkeyPatch, next_n: int, sizes: list[int], overlap: str
) -> None:
    graphs = EagerGraphs(monkeypatch)
    backend = model_backend(checkpoint, **settings_of(next_n))
    graphs.give_to(backend, sizes)
    engine = engine_over(backend, next_n, overlap=overlap)
    found = served(engine)
    assert found.token_ids == expected.token_ids
    assert all(found.cached_tokens[key] == 128 for key in range(len(TAILS)))
    logprobs = [position.logprob for position in expected.logprobs[1]]
    assert [position.logprob for position in found.logprobs[1]] == pytest.approx(logprobs, abs=1e-3)
    # Only the first prompt, of which nothing was cached, was computed without a graph.
    assert [shape.tokens for shape in graphs.others] == [len(KNOWN)]


@pytest.mark.gpu
@pytest.mark.parametrize("next_n", [0, 1, 3])
def test_graphs_of_a_gpu_give_the_tokens_of_the_cpu(monkeypatch: pytest.MonkeyPatch, next_n: int) -> None:
    settings = settings_of(next_n, dtype="float32", device="cuda", warm_up="off")
    resolved = resolve(EngineConfig(model_dir=shipped_model(), **settings), Hardware(1, 1 << 30))
    backend, others = ModelBackend(resolved), list[StepShape]()
    note_others(monkeypatch, backend, others)
    found = served(engine_over(backend, next_n, overlap="on")).token_ids
    assert found == undisturbed(shipped_model()).token_ids
    assert [shape.tokens for shape in others] == [len(KNOWN)]


@pytest.mark.parametrize(("next_n", "sizes"), [(0, [100]), (1, [48])])
def test_tails_in_two_micro_batches_change_no_token(
    checkpoint: Path, expected: Transcript, monkeypatch: pytest.MonkeyPatch, next_n: int, sizes: list[int]
) -> None:
    graphs = EagerGraphs(monkeypatch)
    backend = model_backend(checkpoint, **settings_of(next_n))
    graphs.give_to(backend, sizes, ALWAYS)
    assert served(engine_over(backend, next_n)).token_ids == expected.token_ids
    assert len(graphs.others) == 1


@pytest.mark.parametrize("next_n", [1, 2])
def test_cached_blocks_are_not_written_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, next_n: int) -> None:
    graphs = EagerGraphs(monkeypatch)
    backend = model_backend(checkpoint, **settings_of(next_n))
    graphs.give_to(backend, [48], NEVER)
    engine = engine_over(backend, next_n)
    engine.submit(submit_of(99, KNOWN, 1))
    stored = [block for step in Transcript().run(engine).steps for block in step.stored_blocks]
    blocks = engine.pool.match_prefix(stored)
    assert len(blocks) == 2
    # Change the cached KV, so that computing it again would give other values.
    backend.state.kv_pool[:, blocks] += 0.01
    before = backend.state.kv_pool[:, blocks].clone()
    submit_tails(engine, [3, 4])
    Transcript().run(engine)
    assert torch.equal(backend.state.kv_pool[:, blocks], before)
    assert len(graphs.others) == 1


@pytest.mark.parametrize("next_n", [1, 3])
def test_draft_layers_keep_the_kv_that_steps_of_prompts_leave(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, next_n: int
) -> None:
    kept = []
    for captured in (False, True):
        backend, graphs = model_backend(checkpoint, **settings_of(next_n)), EagerGraphs(monkeypatch)
        if captured:
            graphs.give_to(backend, [48])
        engine = engine_over(backend, next_n, overlap="on")
        prompt = [*KNOWN, *random_prompt(45, seed=3)]
        for key, tokens in enumerate((KNOWN[:130], KNOWN[:110], prompt)):
            engine.submit(submit_of(key, tokens, 1 if key != 1 else 20, ignore_eos=True))
            Transcript().run(engine)
        stored = chain_hashes(prompt)
        kept.append(backend.state.kv_pool[:, engine.pool.match_prefix(stored)])
        assert len(graphs.others) == (1 if captured else 0) and len(stored) == kept[-1].shape[1] == 3
    assert torch.allclose(kept[0], kept[1], atol=1e-3)


def test_a_tail_too_large_for_graphs_is_launched(
    checkpoint: Path, expected: Transcript, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = EagerGraphs(monkeypatch)
    backend = model_backend(checkpoint, **settings_of(0))
    graphs.give_to(backend, [30])
    assert served(engine_over(backend, 0)).token_ids == expected.token_ids
    assert [shape.tokens for shape in graphs.others] == [len(KNOWN), 1 + 38]
    assert not any(shape.decode_only for shape in graphs.others)


FEW: dict[str, Any] = {"max_step_tokens": 128, "total_blocks": 8, "max_requests": 32}


def with_few_blocks(backend: ModelBackend, next_n: int) -> dict[int, list[int]]:
    engine = engine_over(backend, next_n, overlap="on", **FEW)
    for key, length in enumerate((130, 150, 190)):
        prompt = random_prompt(length, seed=length)
        engine.submit(submit_of(key, prompt, 60, sampling=SAMPLINGS[key], ignore_eos=True))
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript.token_ids


@pytest.fixture(scope="module")
def expected_with_few_blocks(checkpoint: Path) -> dict[int, list[int]]:
    return with_few_blocks(model_backend(checkpoint, **settings_of(0, **FEW)), 0)


@pytest.mark.parametrize(("next_n", "sizes"), [(0, [4, 32, 72]), (1, [4, 32])])
def test_last_chunks_and_preempted_requests_go_on_in_graphs(
    checkpoint: Path,
    expected_with_few_blocks: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    next_n: int,
    sizes: list[int],
) -> None:
    graphs = EagerGraphs(monkeypatch)
    backend = model_backend(checkpoint, **settings_of(next_n, **FEW))
    graphs.give_to(backend, sizes)
    assert with_few_blocks(backend, next_n) == expected_with_few_blocks
    assert all(shape.tokens > 2 * (1 + next_n) for shape in graphs.others)
