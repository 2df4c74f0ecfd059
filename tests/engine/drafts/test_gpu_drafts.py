"""Drafts on a GPU: graphs and overlap give the tokens of steps without drafts, in fewer steps."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backend import execute
from engine.batch import Batch
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from engine.step.shape import StepShape
from mesh.domain.sampling import DraftUse, Sampling
from tests.support.checkpoints import random_prompt
from tests.support.engines import Transcript, assert_at_rest, submit_of

SHIPPED_MODEL = Path(__file__).parents[3] / "models/tiny-r1"
TOKENS = 60
PROMPTS = [random_prompt(length, seed=length) for length in (1, 30, 63, 64, 65, 129)]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1, top_p=0.95, top_logprobs=2),
    Sampling(temperature=0.5, seed=2, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={40: 1.0}),
    Sampling(temperature=0.9, seed=3, drafts=DraftUse.OFF),
    Sampling(temperature=0.8, seed=4),
    Sampling(logit_bias={41: 2.0}),
]
WITHOUT: dict[str, Any] = {"device": "cpu", "next_n": 0}


def make_engine(next_n: Any = 3, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {"dtype": "float32", "device": "cuda", "warm_up": "off", "max_step_tokens": 96}
    drafts = DraftsConfig(next_n=next_n)
    settings = {**defaults, "max_requests": 8, "total_blocks": 64, "drafts": drafts, **settings}
    config = EngineConfig(model_dir=SHIPPED_MODEL, **settings)
    return Engine(config, ModelBackend(resolve(config, Hardware(torch.cuda.device_count(), 1 << 30))), time.monotonic)


def served(engine: Engine, tokens: int = TOKENS) -> Transcript:
    for key, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit(submit_of(key, prompt, tokens, sampling=sampling, ignore_eos=True))
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    return served(make_engine(**WITHOUT)).token_ids


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{}, {"next_n": 1}, {"overlap": "off"}, {"decode_graphs": "off"}, {"total_blocks": 11}]
)
def test_drafts_change_no_token(expected: dict[int, list[int]], settings: dict[str, Any]) -> None:
    found = served(make_engine(**settings))
    assert found.token_ids == expected
    yields = {len(output.token_ids) for step in found.steps for output in step.outputs}
    assert yields == set(range(1, 2 + settings.get("next_n", 3)))


@pytest.mark.gpu
def test_a_depth_by_measured_steps_changes_no_token(expected: dict[int, list[int]]) -> None:
    assert served(make_engine("auto")).token_ids == expected


@pytest.mark.gpu
def test_a_dummy_step_with_drafts_writes_to_no_requests_block() -> None:
    engine = make_engine()
    backend = engine._backend
    assert isinstance(backend, ModelBackend)
    with torch.inference_mode():
        backend.state.kv_pool.fill_(0.5)
    assert execute(backend, Batch(0, ()), StepShape(12, drafts=3, drawing=3, rows=3)) == []
    written = (backend.state.kv_pool != 0.5).flatten(2).any(dim=2).any(dim=0)
    assert written.nonzero().flatten().tolist() == [backend.state.padding_block]
