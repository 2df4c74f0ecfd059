"""Drafts that are accepted although other tokens were drawn: when, for which requests, and how it is reported."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import History, Row
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.drafts.relaxation import thoughts
from engine.engine import Engine
from engine.exchange.alone import Alone
from engine.model.tensor_group import TensorGroup
from engine.requests.thinking import ThinkTokens, read_think_tokens
from engine.runner.backend import ModelBackend
from engine.runner.sampler import Sampler
from mesh.domain.sampling import DraftUse, Sampling
from mesh.errors import CheckpointError
from tests.support.checkpoints import (
    model_backend,
    predictable_checkpoint,
    random_prompt,
    tiny_checkpoint,
)
from tests.support.eager_graphs import EagerGraphs
from tests.support.engines import Transcript, assert_at_rest, submit_of

TOKENS = 40
# So hot that most tokens differ from the likeliest ones, which is what the module guesses.
HOT: dict[str, Any] = {"temperature": 1.5, "seed": 3}
THINK = ThinkTokens(open=5, close=6)


def settings_of(**drafts: Any) -> dict[str, Any]:
    return {"max_step_tokens": 96, "max_requests": 8, "drafts": DraftsConfig(**{"next_n": 2, **drafts})}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predictable_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def relaxed_backend(checkpoint: Path, **drafts: Any) -> ModelBackend:
    return model_backend(checkpoint, **settings_of(acceptance="relaxed", **drafts))


def served(
    backend: ModelBackend, *samplings: Sampling, thinking: bool = True, overlap: str = "off", tokens: int = 50
) -> Transcript:
    """Each request has the same prompt, whose last token opens the thinking or closes it."""
    settings = {"total_blocks": backend.total_blocks, "overlap": overlap, **settings_of()}
    config = EngineConfig(model_dir=Path("checkpoint"), **settings)
    engine = Engine(config, backend, time.monotonic)
    prompt = [*random_prompt(tokens), THINK.open if thinking else THINK.close]
    for key, sampling in enumerate(samplings):
        engine.submit(submit_of(key, prompt, TOKENS, sampling=sampling, ignore_eos=True))
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript


def relaxed_outputs(transcript: Transcript) -> set[int]:
    """The requests that have a token from relaxed acceptance."""
    return {output.key for step in transcript.steps for output in step.outputs if output.relaxed}


def relaxed_tokens(transcript: Transcript) -> int:
    return sum(step.drafts.relaxed for step in transcript.steps if step.drafts is not None)


@pytest.fixture(scope="module")
def anything_goes(checkpoint: Path) -> ModelBackend:
    """Accepts every draft while the model thinks."""
    return relaxed_backend(checkpoint, top_n=10_000, delta=1.0)


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> list[int]:
    return served(model_backend(checkpoint, **settings_of()), Sampling(**HOT)).token_ids[0]


def test_a_thinking_request_takes_drafts_that_were_not_drawn(
    anything_goes: ModelBackend, undisturbed: list[int]
) -> None:
    found = served(anything_goes, Sampling(**HOT, drafts=DraftUse.RELAXED))
    assert found.token_ids[0] != undisturbed
    assert relaxed_outputs(found) == {0} and relaxed_tokens(found) > 0
    # All drafts are accepted until the thinking ends.
    first = [len(output.token_ids) for step in found.steps for output in step.outputs][:4]
    assert first == [1, 3, 3, 3]


def test_steps_launched_ahead_take_the_same_drafts(anything_goes: ModelBackend) -> None:
    sampling = Sampling(**HOT, drafts=DraftUse.RELAXED)
    found, expected = (served(anything_goes, sampling, overlap=overlap) for overlap in ("on", "off"))
    assert found.token_ids == expected.token_ids and relaxed_tokens(found) == relaxed_tokens(expected) > 0


def test_a_tail_takes_the_same_drafts_in_graphs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Sampling(**HOT, drafts=DraftUse.RELAXED), Sampling(temperature=1.2, seed=5, drafts=DraftUse.RELAXED)]
    rule = {"top_n": 1000, "delta": 0.999}
    expected = served(relaxed_backend(checkpoint, **rule), *asked, overlap="on", tokens=70)
    graphs, backend = EagerGraphs(monkeypatch), relaxed_backend(checkpoint, **rule)
    graphs.give_to(backend, [8])
    found = served(backend, *asked, overlap="on", tokens=70)
    assert len(graphs.others) == 1 and found.cached_tokens == {0: 0, 1: 64}
    assert found.token_ids == expected.token_ids
    assert relaxed_tokens(found) == relaxed_tokens(expected) > 0 and relaxed_outputs(found) == {0, 1}


@pytest.mark.parametrize("use", [DraftUse.UNSPECIFIED, DraftUse.OFF, DraftUse.STRICT])
def test_a_strict_request_has_the_tokens_that_are_drawn(
    anything_goes: ModelBackend, undisturbed: list[int], use: DraftUse
) -> None:
    found = served(anything_goes, Sampling(**HOT, drafts=use), Sampling(**HOT, drafts=DraftUse.RELAXED))
    assert found.token_ids[0] == undisturbed
    assert relaxed_outputs(found) == {1}


def test_a_request_without_drafts_has_one_token_a_step(anything_goes: ModelBackend) -> None:
    found = served(anything_goes, Sampling(drafts=DraftUse.OFF))
    assert {len(output.token_ids) for step in found.steps for output in step.outputs} == {1}


def test_an_answer_after_thinking_has_the_tokens_that_are_drawn(anything_goes: ModelBackend) -> None:
    expected = served(anything_goes, Sampling(**HOT), thinking=False).token_ids[0]
    assert THINK.open not in expected
    found = served(anything_goes, Sampling(**HOT, drafts=DraftUse.RELAXED), thinking=False)
    assert found.token_ids[0] == expected
    assert not relaxed_outputs(found)


def test_drafts_far_from_the_likeliest_token_are_not_taken(tmp_path: Path) -> None:
    # A random module's guesses are far from what the model finds likely.
    backend = relaxed_backend(tiny_checkpoint(tmp_path), top_n=1, delta=0.0)
    found, expected = (served(backend, Sampling(**HOT, drafts=use)) for use in (DraftUse.RELAXED, DraftUse.STRICT))
    assert found.token_ids == expected.token_ids and not relaxed_outputs(found)


def test_relaxed_drafts_that_change_no_greedy_token_change_none(checkpoint: Path) -> None:
    """The likeliest token is what a greedy request draws."""
    strict = served(model_backend(checkpoint, **settings_of()), Sampling()).token_ids
    found = served(relaxed_backend(checkpoint, top_n=1, delta=0.0), Sampling(drafts=DraftUse.RELAXED))
    assert found.token_ids == strict and not relaxed_outputs(found)


def test_penalties_count_the_token_that_was_taken() -> None:
    """Token 2 was accepted in place of token 1. Token 1 must not be counted, or it would be the less likely next."""
    logits, given = torch.tensor([[0.0, 2.0, 1.5, 0.0]]), [3, 3]
    sampler = Sampler(1, 4, logits.device, TensorGroup(Alone()))
    sampling = Sampling(presence_penalty=1.0)

    def row(tokens: list[int]) -> Row:
        return Row(tokens[-1:], len(tokens) - 1, [0], sampling, history=History(1, len(given), tokens))

    taken = sampler.draw(logits, [row(given)], lambda logits, token_ids, rows: torch.full_like(token_ids, 2))
    assert taken.tolist() == [2]
    assert sampler.draw(logits, [row([*given, 2])]).tolist() == [1]


def test_each_draft_is_a_thought_by_what_comes_before_it() -> None:
    drafts = torch.tensor([[9, 9, 9], [9, THINK.close, 9], [THINK.open, 9, THINK.close], [THINK.close, THINK.open, 9]])
    before = torch.tensor([True, True, False, True])
    assert thoughts(drafts, before, THINK).tolist() == [
        [True, True, True],
        [True, True, False],
        [False, True, True],
        [True, False, True],
    ]


def test_relaxed_acceptance_of_a_checkpoint_without_think_tokens_is_refused(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    (directory / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="<think>"):
        model_backend(directory, **settings_of(acceptance="relaxed"))


def test_the_checkpoint_has_the_tokens_that_these_tests_use(checkpoint: Path) -> None:
    assert read_think_tokens(checkpoint) == THINK
