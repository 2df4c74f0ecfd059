"""Steps with drafts in graphs. Here the captured work runs eagerly on a CPU, over the same tensors."""

import time
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from mesh.domain.sampling import DraftUse, Sampling
from tests.support.checkpoints import model_backend, predictable_checkpoint, random_prompt
from tests.support.eager_graphs import EagerGraphs
from tests.support.engines import Transcript, assert_at_rest, submit_of

TOKENS = 30
PROMPTS = [random_prompt(length, seed=length) for length in (30, 63, 64, 100)]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1, top_p=0.95, top_logprobs=2),
    Sampling(temperature=0.5, seed=2, frequency_penalty=0.2),
    Sampling(drafts=DraftUse.OFF),
]


def settings_of(next_n: Any) -> dict[str, Any]:
    return {"drafts": DraftsConfig(next_n=next_n), "max_step_tokens": 96, "max_requests": 6}


def served(backend: ModelBackend, next_n: Any, overlap: str) -> Transcript:
    config = EngineConfig(model_dir=Path("checkpoint"), **{"overlap": overlap, **settings_of(next_n)})
    engine = Engine(config, backend, time.monotonic)
    for key, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit(submit_of(key, prompt, TOKENS, sampling=sampling, ignore_eos=True))
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript


def test_graphs_and_overlap_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = predictable_checkpoint(tmp_path)
    expected = served(model_backend(checkpoint, **settings_of(0)), 0, "off")
    graphs = EagerGraphs(monkeypatch)
    backend = model_backend(checkpoint, **settings_of(2))
    graphs.give_to(backend, [2, 6])
    found = served(backend, 2, "on")
    assert found.token_ids == expected.token_ids
    # Each step but those of the prompts runs two graphs.
    assert graphs.runs > len(found.steps)
    expected_logprobs = [position.logprob for position in expected.logprobs[1]]
    assert [position.logprob for position in found.logprobs[1]] == pytest.approx(expected_logprobs, abs=1e-3)
