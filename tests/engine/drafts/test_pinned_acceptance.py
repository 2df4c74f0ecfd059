"""Drafts of random weights that count as right as often as a measurement says, in served steps."""

import time
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from mesh.config_values import validate
from mesh.errors import ConfigError
from tests.support.checkpoints import model_backend, random_prompt, tiny_checkpoint
from tests.support.eager_graphs import EagerGraphs
from tests.support.engines import Transcript, assert_at_rest, submit_of

KNOWN = random_prompt(150)
TOKENS = 13


def settings_of(*shares: float) -> dict[str, Any]:
    drafts = DraftsConfig(next_n=2, pinned_acceptance=shares)
    return {"drafts": drafts, "random_weights": True, "max_step_tokens": 192, "max_requests": 8, "total_blocks": 32}


def steps_of(backend: ModelBackend, *shares: float) -> list[int]:
    """Steps of a request that computes its prompt, and of one that has only a tail of it to compute."""
    engine = Engine(EngineConfig(model_dir=Path("checkpoint"), **settings_of(*shares)), backend, time.monotonic)
    counts = list[int]()
    for key, prompt in enumerate((KNOWN, [*KNOWN[:128], *random_prompt(22, seed=1)])):
        engine.submit(submit_of(key, prompt, TOKENS, ignore_eos=True))
        transcript = Transcript().run(engine)
        assert len(transcript.token_ids[key]) == TOKENS
        counts.append(len(transcript.steps))
    assert_at_rest(engine)
    return counts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_nextn_predict_layers=1)


@pytest.mark.parametrize("captured", [True, False])
def test_right_drafts_shorten_answers_however_steps_are_computed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    counts = []
    for shares in ((1.0, 1.0), (1.0,), (0.0,)):
        backend, graphs = model_backend(checkpoint, **settings_of(*shares)), EagerGraphs(monkeypatch)
        if captured:
            graphs.give_to(backend, [8])
        counts.append(steps_of(backend, *shares))
    # After the token that the prompt gives, each step brings three, two or one; few guesses are right by chance.
    most, some, none = counts
    assert most == [5, 5] and max(some) <= 7 < min(none)


@pytest.mark.parametrize(
    ("random_weights", "shares", "reason"),
    [
        (False, (0.8,), "set engine.random_weights=true"),
        (True, (0.4, 0.8), "must not rise"),
        (True, (1.2,), "pinned_acceptance: expected"),
    ],
)
def test_what_pinned_drafts_need_is_named(random_weights: bool, shares: tuple[float, ...], reason: str) -> None:
    drafts = {"next_n": 2, "pinned_acceptance": shares}
    values = {"model_dir": "checkpoint", "random_weights": random_weights, "drafts": drafts}
    with pytest.raises(ConfigError, match=reason):
        validate(EngineConfig, values, "engine")
