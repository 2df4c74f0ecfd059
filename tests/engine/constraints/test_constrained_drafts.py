"""Constrained answers with drafts, some of which are right: tokens equal those without drafts."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.drafts.config import DraftsConfig
from engine.protocol.messages import Submit
from engine.runner.backend import ModelBackend
from mesh.domain.constraints import Constraint
from mesh.domain.sampling import DraftUse, Sampling
from tests.support.checkpoints import model_backend, predictable_checkpoint, random_prompt
from tests.support.constrained import ConstrainedEngine, Texts
from tests.support.eager_graphs import EagerGraphs
from tests.support.engines import Transcript, assert_at_rest, submit_of

TOKENS = 32
DRAFTS = 3
ITEM = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LIST = {"type": "array", "items": ITEM, "minItems": 3, "maxItems": 3, "x-guidance": {"whitespace_flexible": False}}
JSON = f"start: %json {json.dumps(LIST)}"
# The id of </think>.
CLOSE = 6
ANSWERS: list[tuple[Constraint, Sampling]] = [
    (Constraint(JSON), Sampling()),
    (Constraint(JSON), Sampling(temperature=0.7, seed=1, top_logprobs=2)),
    (Constraint(JSON, free_until=CLOSE), Sampling(temperature=0.5, seed=2, logit_bias={CLOSE: 8.0})),
    (Constraint("start: /[0-9]{20}(ab)*/"), Sampling(temperature=0.9, seed=3, frequency_penalty=0.2)),
    (Constraint(banned=[[40], [50, 51]], min_tokens=20), Sampling(temperature=1.0, seed=4)),
]


def settings_of(next_n: int, **settings: Any) -> dict[str, Any]:
    return {"drafts": DraftsConfig(next_n=next_n), "max_step_tokens": 96, "max_requests": 8, **settings}


def submits() -> list[Submit]:
    """The constrained requests, and a free one."""
    given = [*ANSWERS, (None, Sampling(temperature=0.7, seed=5))]
    return [
        submit_of(key, random_prompt(30 + key, seed=key), TOKENS, constraint=constraint, sampling=sampling)
        for key, (constraint, sampling) in enumerate(given)
    ]


def served(checkpoint: Path, backend: ModelBackend, next_n: int, *asked: Submit, **settings: Any) -> Transcript:
    constrained = ConstrainedEngine(checkpoint, backend, **settings_of(next_n, **settings))
    transcript = constrained.run(*(asked or submits()))
    assert_at_rest(constrained.engine)
    return transcript


def yields(transcript: Transcript, key: int) -> set[int]:
    """The numbers of tokens that the request got in its steps."""
    return {len(output.token_ids) for step in transcript.steps for output in step.outputs if output.key == key}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = predictable_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    assert Texts(directory).ids("</think>") == [CLOSE]
    return directory


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Transcript:
    """The answers without drafts, step by step."""
    return served(checkpoint, model_backend(checkpoint, **settings_of(0)), 0, overlap="off")


@pytest.fixture(scope="module")
def drafting(checkpoint: Path) -> ModelBackend:
    return model_backend(checkpoint, **settings_of(DRAFTS))


def assert_same(found: Transcript, plain: Transcript) -> None:
    assert found.token_ids == plain.token_ids
    assert all(found.ends[key].finish == end.finish for key, end in plain.ends.items())
    expected = [position.logprob for position in plain.logprobs[1]]
    assert [position.logprob for position in found.logprobs[1]] == pytest.approx(expected, abs=1e-3)


def test_tokens_are_those_without_drafts_in_fewer_steps(
    checkpoint: Path, drafting: ModelBackend, plain: Transcript
) -> None:
    found = served(checkpoint, drafting, DRAFTS, overlap="off")
    assert_same(found, plain)
    # Some drafts are right, and some are not or are refused.
    assert all({1, 2} <= yields(found, key) for key in range(4))


def test_preemption_changes_no_token_of_steps_launched_ahead(
    checkpoint: Path, drafting: ModelBackend, plain: Transcript
) -> None:
    assert_same(served(checkpoint, drafting, DRAFTS, overlap="on", total_blocks=8), plain)


def test_graphs_change_no_token(checkpoint: Path, plain: Transcript, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the captured work runs eagerly, over the same tensors."""
    graphs = EagerGraphs(monkeypatch)
    backend = model_backend(checkpoint, **settings_of(DRAFTS))
    graphs.give_to(backend, [2, 8])
    found = served(checkpoint, backend, DRAFTS, overlap="on")
    assert_same(found, plain)
    assert graphs.runs > len(found.steps)


def behind_a_prefix() -> list[Submit]:
    known = random_prompt(64, seed=9)
    return [
        submit_of(key, [*known, *random_prompt(9 + key, seed=key)], TOKENS, constraint=constraint, sampling=sampling)
        for key, (constraint, sampling) in enumerate(ANSWERS)
    ]


@pytest.fixture(scope="module")
def plain_behind_a_prefix(checkpoint: Path) -> Transcript:
    backend = model_backend(checkpoint, **settings_of(0))
    return served(checkpoint, backend, 0, *behind_a_prefix(), overlap="off", prefix_cache=False)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_few_tokens_after_cached_blocks_change_no_token_in_graphs(
    checkpoint: Path, plain_behind_a_prefix: Transcript, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    graphs = EagerGraphs(monkeypatch)
    backend = model_backend(checkpoint, **settings_of(DRAFTS, max_requests=24))
    graphs.give_to(backend, [24])
    # The first request computes the prefix that the others find.
    found = served(checkpoint, backend, DRAFTS, *behind_a_prefix(), overlap=overlap, max_requests=24)
    assert_same(found, plain_behind_a_prefix)
    assert sum(found.cached_tokens.values()) == 4 * 64 and len(graphs.others) == 1


def test_another_worker_goes_on_with_drafts(checkpoint: Path, drafting: ModelBackend, plain: Transcript) -> None:
    rest = []
    for key, (constraint, sampling) in enumerate(ANSWERS):
        prompt, tokens = random_prompt(30 + key, seed=key), plain.token_ids[key][: 1 + 4 * key]
        rest.append(
            submit_of(
                key,
                [*prompt, *tokens],
                TOKENS - len(tokens),
                constraint=constraint,
                sampling=sampling,
                prompt_tokens=len(prompt),
            )
        )
    continued = served(checkpoint, drafting, DRAFTS, *rest).token_ids
    for key in range(len(ANSWERS)):
        assert [*plain.token_ids[key][: 1 + 4 * key], *continued[key]] == plain.token_ids[key]


def test_a_stop_token_ends_an_answer_among_accepted_drafts(
    checkpoint: Path, drafting: ModelBackend, plain: Transcript
) -> None:
    asked, expected, tokens = [], {}, plain.token_ids[0]
    for key, token_id in enumerate(tokens[2:10]):
        expected[key] = tokens[: 1 + tokens.index(token_id)]
        constraint = ANSWERS[0][0]
        asked.append(submit_of(key, random_prompt(30), TOKENS, constraint=constraint, stop_token_ids=[token_id]))
    assert served(checkpoint, drafting, DRAFTS, *asked, overlap="on").token_ids == expected


def test_relaxed_drafts_keep_to_the_form(checkpoint: Path) -> None:
    """While the model thinks, all drafts are accepted except those that the form forbids."""
    drafts = DraftsConfig(next_n=2, acceptance="relaxed", top_n=10_000, delta=1.0)
    backend = model_backend(checkpoint, **settings_of(0) | {"drafts": drafts})
    texts = Texts(checkpoint)
    prompt, sampling = [*random_prompt(50), *texts.ids("<think>")], Sampling(temperature=1.5, seed=3)
    asked = [
        submit_of(
            key,
            prompt,
            TOKENS,
            constraint=Constraint("start: /[0-Z]{24}/"),
            sampling=msgspec.structs.replace(sampling, drafts=use),
        )
        for key, use in enumerate((DraftUse.STRICT, DraftUse.RELAXED))
    ]
    found = served(checkpoint, backend, 2, *asked)
    assert {output.key for step in found.steps for output in step.outputs if output.relaxed} == {1}
    answers = [texts.of(found.token_ids[key]) for key in range(2)]
    assert answers[0] != answers[1] and all(re.fullmatch("[0-Z]{24}", answer) for answer in answers)
