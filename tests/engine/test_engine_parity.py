"""The engine on a real checkpoint against transformers, in fp32: however a request is run, its tokens are the same."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.protocol.messages import Submit
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import model_backend, random_prompt, tiny_checkpoint
from tests.support.engines import Transcript, assert_at_rest, submit_of

# If the best two logits are closer, rounding may choose.
MARGIN = 1e-3
# On both sides of the block's 64 and of chunks of 96 tokens.
LENGTHS = (1, 2, 63, 64, 65, 95, 96, 97, 128, 129, 192, 193, 300)
TOKENS = 20
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(params=[0, 2])
def next_n(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> DeepseekV3ForCausalLM:
    return DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def engine_over(checkpoint: Path, next_n: int = 0, **settings: Any) -> Engine:
    drafts = DraftsConfig(next_n=next_n)
    settings = {"max_step_tokens": 96, "max_requests": 16, "total_blocks": 64, "drafts": drafts, **settings}
    config = EngineConfig(model_dir=checkpoint, **settings)
    return Engine(config, model_backend(checkpoint, **settings), time.monotonic)


def greedy_submits() -> list[Submit]:
    return [submit_of(key, prompt, TOKENS, ignore_eos=True) for key, prompt in enumerate(PROMPTS)]


def growing_submits(temperature: float) -> list[Submit]:
    """Four requests that each grow from two blocks to three."""
    return [
        submit_of(key, prompt, 40, sampling=Sampling(temperature=temperature, top_p=0.95, seed=key), ignore_eos=True)
        for key, prompt in enumerate(PROMPTS[5:9])
    ]


def run(engine: Engine, submits: list[Submit]) -> Transcript:
    for submit in submits:
        engine.submit(submit)
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript


def assert_as_transformers(
    reference: DeepseekV3ForCausalLM, submits: list[Submit], token_ids: dict[int, list[int]]
) -> None:
    """Assert that each token is the one that transformers would choose after the engine's own tokens before it."""
    decided = 0
    for submit in submits:
        drawn = torch.tensor(token_ids[submit.key])
        with torch.inference_mode():
            logits = reference(torch.tensor([[*submit.request.token_ids, *token_ids[submit.key]]])).logits[0]
        best = logits[len(submit.request.token_ids) - 1 : -1].topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > MARGIN
        assert torch.equal(drawn[clear], best.indices[clear, 0])
        decided += int(clear.sum())
    assert decided > 0.9 * sum(len(tokens) for tokens in token_ids.values())


def test_prompts_batched_and_chunked_match(checkpoint: Path, reference: DeepseekV3ForCausalLM, next_n: int) -> None:
    submits = greedy_submits()
    transcript = run(engine_over(checkpoint, next_n), submits)
    assert_as_transformers(reference, submits, transcript.token_ids)


def test_requests_alone_match_and_equal_the_batched_ones(checkpoint: Path, reference: DeepseekV3ForCausalLM) -> None:
    submits = greedy_submits()
    engine = engine_over(checkpoint, max_step_tokens=2048)
    alone = {submit.key: run(engine, [submit]).token_ids[submit.key] for submit in submits}
    assert_as_transformers(reference, submits, alone)
    assert alone == run(engine_over(checkpoint), submits).token_ids


def test_a_second_turn_over_cached_blocks_matches(
    checkpoint: Path, reference: DeepseekV3ForCausalLM, next_n: int
) -> None:
    engine = engine_over(checkpoint, next_n, total_blocks=128)
    first = run(engine, greedy_submits())
    second = [
        submit_of(key, [*submit.request.token_ids, *first.token_ids[key], *random_prompt(5)], 10, ignore_eos=True)
        for key, submit in enumerate(greedy_submits())
    ]
    transcript = run(engine, second)
    assert [transcript.cached_tokens[key] for key in range(len(LENGTHS))] == [
        (length + TOKENS - 1) // 64 * 64 for length in LENGTHS
    ]
    assert_as_transformers(reference, second, transcript.token_ids)


def preempting_run(checkpoint: Path, submits: list[Submit], next_n: int = 0) -> Transcript:
    engine = engine_over(checkpoint, next_n, total_blocks=8)
    for submit in submits:
        engine.submit(submit)
    transcript = Transcript()
    preempted = False
    while engine.has_work():
        transcript.record(engine.step())
        started = len(transcript.token_ids) - len(transcript.ends)
        preempted = preempted or engine.load().running_requests < started
    assert preempted
    assert_at_rest(engine)
    return transcript


def test_preempted_requests_match(checkpoint: Path, reference: DeepseekV3ForCausalLM, next_n: int) -> None:
    submits = growing_submits(temperature=0.0)
    transcript = preempting_run(checkpoint, submits, next_n)
    assert_as_transformers(reference, submits, transcript.token_ids)


def test_sampled_tokens_are_the_same_alone_batched_and_preempted(checkpoint: Path) -> None:
    submits = growing_submits(temperature=0.8)
    batched = run(engine_over(checkpoint), submits).token_ids
    engine = engine_over(checkpoint)
    assert {submit.key: run(engine, [submit]).token_ids[submit.key] for submit in submits} == batched
    assert preempting_run(checkpoint, submits).token_ids == batched
    assert preempting_run(checkpoint, submits, next_n=2).token_ids == batched


def test_another_seed_gives_other_tokens(checkpoint: Path) -> None:
    engine = engine_over(checkpoint)
    submits = [
        submit_of(key, PROMPTS[-1], TOKENS, sampling=Sampling(temperature=0.8, seed=key), ignore_eos=True)
        for key in range(2)
    ]
    token_ids = run(engine, submits).token_ids
    assert token_ids[0] != token_ids[1]
