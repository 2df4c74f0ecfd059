"""Drafts, some right and some wrong: tokens equal those without them, and their layer's KV depends on tokens alone."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backend import execute
from engine.batch import Batch, Row
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.drafts.plan import leading_rows, plan_draft_prompts, plan_draws
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from engine.step.shape import StepShape
from mesh.domain.sampling import Sampling
from mesh.errors import CheckpointError
from tests.support.checkpoints import (
    GREEDY,
    edit_config,
    model_backend,
    predictable_checkpoint,
    random_prompt,
    rewrite_as_one_file,
    tiny_checkpoint,
)
from tests.support.engines import Transcript, assert_at_rest, submit_of

TOKENS = 40
PROMPTS = [random_prompt(length, seed=length) for length in (30, 64, 129)]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1, top_p=0.95, top_logprobs=2),
    Sampling(temperature=0.5, seed=2, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={40: 1.0}),
]


def engine_over(backend: ModelBackend, next_n: int, **settings: Any) -> Engine:
    settings = {"max_step_tokens": 96, "max_requests": 8, "total_blocks": backend.total_blocks, **settings}
    config = EngineConfig(model_dir=Path("checkpoint"), drafts=DraftsConfig(next_n=next_n), **settings)
    return Engine(config, backend, time.monotonic)


def drafting_backend(directory: Path, next_n: int, **settings: Any) -> ModelBackend:
    settings = {"max_step_tokens": 96, "max_requests": 8, **settings}
    return model_backend(directory, drafts=DraftsConfig(next_n=next_n), **settings)


def served(engine: Engine, prompts: list[list[int]], samplings: list[Sampling], tokens: int = TOKENS) -> Transcript:
    for key, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        engine.submit(submit_of(key, prompt, tokens, sampling=sampling, ignore_eos=True))
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predictable_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def backends(checkpoint: Path) -> dict[int, ModelBackend]:
    """By number of drafts."""
    return {next_n: drafting_backend(checkpoint, next_n) for next_n in (0, 1, 3)}


@pytest.fixture(scope="module")
def undisturbed(backends: dict[int, ModelBackend]) -> Transcript:
    return served(engine_over(backends[0], 0), PROMPTS, SAMPLINGS)


@pytest.mark.parametrize(("next_n", "overlap"), [(1, "off"), (3, "off"), (3, "on")])
def test_tokens_are_those_without_drafts_in_fewer_steps(
    backends: dict[int, ModelBackend], undisturbed: Transcript, next_n: int, overlap: str
) -> None:
    found = served(engine_over(backends[next_n], next_n, overlap=overlap), PROMPTS, SAMPLINGS)
    assert found.token_ids == undisturbed.token_ids
    yields = {len(output.token_ids) for step in found.steps for output in step.outputs}
    assert yields == set(range(1, 2 + next_n))
    expected = [position.logprob for position in undisturbed.logprobs[1]]
    assert [position.logprob for position in found.logprobs[1]] == pytest.approx(expected, abs=1e-3)


def test_a_second_turn_with_drafts_goes_on_after_shared_blocks(backends: dict[int, ModelBackend]) -> None:
    turns = {}
    for next_n in (0, 3):
        engine = engine_over(backends[next_n], next_n)
        first = served(engine, PROMPTS, SAMPLINGS)
        again = [[*prompt, *first.token_ids[key], 50, 51] for key, prompt in enumerate(PROMPTS)]
        second = served(engine, again, SAMPLINGS, 12)
        turns[next_n] = (second.token_ids, second.cached_tokens)
    assert turns[3] == turns[0]
    assert turns[3][1] == {0: 64, 1: 64, 2: 128}


@pytest.mark.parametrize("next_n", [0, 1])
def test_a_continuation_with_fewer_drafts_has_the_same_tokens(
    backends: dict[int, ModelBackend], undisturbed: Transcript, next_n: int
) -> None:
    delivered = served(engine_over(backends[3], 3), PROMPTS, SAMPLINGS, 25).token_ids
    engine = engine_over(backends[next_n], next_n)
    for key, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        rest = {"sampling": sampling, "prompt_tokens": len(prompt), "ignore_eos": True}
        engine.submit(submit_of(key, [*prompt, *delivered[key]], TOKENS - 25, **rest))
    continued = Transcript().run(engine).token_ids
    assert {key: [*delivered[key], *continued[key]] for key in continued} == undisturbed.token_ids


def draft_latents(backend: ModelBackend, blocks: list[int]) -> torch.Tensor:
    """The latents that the draft layer keeps for these blocks: [tokens, latent]."""
    return backend.state.kv_pool[-1, blocks].flatten(0, 1).clone()


def blocks_of(engine: Engine, transcript: Transcript) -> list[int]:
    """The pool's blocks that hold the stored contents, in order."""
    return engine.pool.match_prefix(block for step in transcript.steps for block in step.stored_blocks)


def test_a_blocks_draft_kv_is_equal_however_it_was_computed(tmp_path: Path) -> None:
    directory, prompt = tiny_checkpoint(tmp_path), random_prompt(236)
    whole = drafting_backend(directory, 2, max_step_tokens=256)
    engine = engine_over(whole, 2, max_step_tokens=256)
    answer = served(engine, [prompt], [GREEDY], 24)
    expected = draft_latents(whole, blocks_of(engine, answer))
    assert len(expected) == 256 and expected.abs().sum(1).all()
    # Now in chunks, after another request has computed the first block, with another number of drafts.
    other = drafting_backend(directory, 1, max_step_tokens=64)
    engine = engine_over(other, 1, max_step_tokens=64)
    short = served(engine, [prompt[:100]], [GREEDY], 1)
    before = draft_latents(other, blocks_of(engine, short))
    rest = served(engine, [prompt], [GREEDY], 24)
    assert rest.token_ids == answer.token_ids and rest.cached_tokens == {0: 64}
    found = draft_latents(other, [*blocks_of(engine, short), *engine.pool.match_prefix(chain_of(answer))[1:]])
    assert torch.equal(found[:64], before)
    assert torch.allclose(found, expected, atol=1e-4)


def chain_of(transcript: Transcript) -> list[bytes]:
    return [block for step in transcript.steps for block in step.stored_blocks]


def test_a_token_computed_again_leaves_shared_blocks_alone(tmp_path: Path) -> None:
    backend = drafting_backend(tiny_checkpoint(tmp_path), 2)
    engine, prompt = engine_over(backend, 2), random_prompt(130)
    blocks = blocks_of(engine, served(engine, [prompt], [GREEDY], 1))
    before = backend.state.kv_pool[:, blocks].clone()
    second = served(engine, [prompt], [GREEDY], 20)
    assert second.cached_tokens == {0: 128}
    assert torch.equal(backend.state.kv_pool[:, blocks], before)


def test_a_model_without_an_mtp_module_drafts_nothing(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    rewrite_as_one_file(directory, lambda tensors: drop(tensors, "model.layers.3."))
    with pytest.raises(CheckpointError, match=r"holds no MTP module .* set engine\.drafts\.next_n=0"):
        drafting_backend(directory, 1)
    edit_config(directory, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="describes no MTP module"):
        drafting_backend(directory, 1)


def drop(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


@pytest.mark.parametrize("shape", [StepShape(1, drafts=2), StepShape(40, decode_only=False, drafts=2)])
def test_a_dummy_step_with_drafts_writes_to_no_requests_block(tmp_path: Path, shape: StepShape) -> None:
    backend = drafting_backend(tiny_checkpoint(tmp_path), 2)
    with torch.inference_mode():
        backend.state.kv_pool.fill_(0.5)
    assert execute(backend, Batch(0, ()), shape) == []
    written = (backend.state.kv_pool != 0.5).flatten(2).any(dim=2).any(dim=0)
    assert written.nonzero().flatten().tolist() == [backend.state.padding_block]


def test_the_draft_layer_shares_embedding_and_head_but_no_kv(tmp_path: Path) -> None:
    plain, drafting = (drafting_backend(tiny_checkpoint(tmp_path / str(next_n)), next_n) for next_n in (0, 1))
    names = [parameter.name for parameter in drafting._model.parameters()]
    assert "model.layers.3.eh_proj.weight" in names
    assert not [name for name in names if name.startswith("model.layers.3.") and ("embed" in name or ".head." in name)]
    assert (plain.namespace.layers, drafting.namespace.layers) == (3, 4)
    assert drafting.block_bytes * 3 == plain.block_bytes * 4


def test_preemption_and_late_arrivals_change_no_token_launched_ahead(
    backends: dict[int, ModelBackend], undisturbed: Transcript
) -> None:
    engine = engine_over(backends[3], 3, overlap="on", total_blocks=7)
    transcript = Transcript()
    for key, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit(submit_of(key, prompt, TOKENS, sampling=sampling, ignore_eos=True))
        for _ in range(5):
            transcript.record(engine.step())
    assert transcript.run(engine).token_ids == undisturbed.token_ids
    assert_at_rest(engine)


ROWS = [
    Row([7], 64, [3, 4], GREEDY),
    Row([5, 6], 10, [1], GREEDY, drafts=1),
    Row([1, 2, 3], 0, [2], None, next_token=4),
    Row([8, 9], 62, [5], GREEDY),
]


def test_a_row_draws_after_its_last_token_and_each_draft() -> None:
    draws = plan_draws(ROWS, [0, 1, 3, 6], width=3)
    assert (draws.drawing, draws.first) == ([0, 1, 3], [0, 1, 3])
    assert (draws.tokens, draws.places) == ([0, 1, 2, 7], [0, 3, 4, 6])
    assert [ROWS.index(row) for row in draws.rows] == [0, 1, 1, 3]


def test_the_draft_layer_computes_prompts_one_position_later() -> None:
    assert leading_rows(ROWS) == ROWS[:2]
    plan = plan_draft_prompts(ROWS[2:], 3, padding_block=99)
    spans = [(list(row.token_ids), row.start, list(row.block_ids)) for row in plan.rows]
    assert spans == [([1, 2, 3, 4], 0, [2]), ([9, 0], 63, [5, 99])]
    assert plan.sources == [None, 3, 4, 5, 6, 7]
    assert (plan.drawn, plan.positions) == ([5], [64])


@pytest.mark.check("drafts")
def test_an_engine_that_chooses_depths_draws_the_same_tokens(checkpoint: Path, undisturbed: Transcript) -> None:
    backend = model_backend(checkpoint, drafts=DraftsConfig(next_n="auto"), max_step_tokens=96, max_requests=3)
    assert backend.step_times is not None and list(backend.step_times.rows) == [1, 2, 3]
    assert all(second > 0 for seconds in backend.step_times.seconds for second in seconds)
    config = EngineConfig(
        model_dir=Path("checkpoint"), drafts=DraftsConfig(next_n="auto"), max_step_tokens=96, max_requests=3
    )
    found = served(Engine(config, backend, time.monotonic), PROMPTS, SAMPLINGS)
    assert found.token_ids == undisturbed.token_ids
