"""Constrained answers of a model with random weights, which would write no JSON without a constraint."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.constraints.answer import ConstrainedAnswer
from engine.protocol.messages import Cancel, Submit
from mesh.domain.constraints import Constraint
from mesh.domain.outputs import FinishReason
from mesh.domain.sampling import Sampling
from mesh.errors import InvalidConstraint
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.constrained import ConstrainedEngine, Texts
from tests.support.engines import Transcript, assert_at_rest, submit_of

TOKENS = 120
FREE_TOKENS = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Constraint(f"start: %json {json.dumps(SCHEMA)}")
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=1.3, seed=2, top_k=30, frequency_penalty=0.5),
    Sampling(temperature=0.8, seed=3, top_logprobs=2, min_p=0.01),
]
MODES: dict[str, dict[str, Any]] = {
    "a step ahead": {"overlap": "on"},
    "preempted": {"overlap": "on", "total_blocks": 5},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def texts(checkpoint: Path) -> Texts:
    return Texts(checkpoint)


def constrained(key: int, constraint: Constraint = JSON, **settings: Any) -> Submit:
    sampling = settings.pop("sampling", SAMPLINGS[key % len(SAMPLINGS)])
    prompt = settings.pop("prompt", random_prompt(60 + key, seed=key))
    return submit_of(
        key, prompt, settings.pop("max_tokens", TOKENS), sampling=sampling, constraint=constraint, **settings
    )


def free(key: int) -> Submit:
    return submit_of(key, random_prompt(150, seed=key), FREE_TOKENS, ignore_eos=True)


def valid(text: str) -> bool:
    answer = json.loads(text)
    return (
        list(answer) == ["name", "tags", "age"]
        and len(answer["name"]) <= 12
        and set(answer["tags"]) <= {"red", "green"}
        and 0 <= answer["age"] <= 130
    )


def run(checkpoint: Path, *submits: Submit, **settings: Any) -> Transcript:
    """Run the requests to their ends. With too few blocks for all, asserts that some were preempted."""
    constrained_engine, transcript = ConstrainedEngine(checkpoint, **settings), Transcript()
    engine = constrained_engine.engine
    constrained_engine.submit(*submits)
    preempted = False
    while engine.has_work():
        transcript.record(engine.step())
        begun = transcript.token_ids.keys() - transcript.ends.keys()
        preempted = preempted or engine.load().running_requests < len(begun)
    assert preempted == ("total_blocks" in settings)
    assert_at_rest(engine)
    return transcript


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Transcript:
    """Four constrained answers and two free ones, step by step."""
    return run(checkpoint, *map(constrained, range(4)), free(4), free(5), overlap="off")


def test_every_answer_is_valid_among_free_ones(texts: Texts, whole: Transcript) -> None:
    for key in range(4):
        assert whole.ends[key].finish is FinishReason.STOP
        assert valid(texts.of(whole.token_ids[key]))
    assert len(whole.token_ids[4]) == len(whole.token_ids[5]) == FREE_TOKENS


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_same_however_the_steps_are_run(checkpoint: Path, whole: Transcript, mode: str) -> None:
    # Without free requests, none of these is preempted in the constrained ones' place.
    others = () if mode == "preempted" else (free(4), free(5))
    transcript = run(checkpoint, *map(constrained, range(4)), *others, **MODES[mode])
    assert transcript.token_ids == {key: whole.token_ids[key] for key in range(4 + len(others))}


def test_another_worker_goes_on_where_the_first_was_lost(checkpoint: Path, whole: Transcript) -> None:
    delivered = {key: whole.token_ids[key][: 1 + 6 * key] for key in range(4)}
    rest = [
        constrained(
            key,
            prompt=[*random_prompt(60 + key, seed=key), *tokens],
            prompt_tokens=60 + key,
            max_tokens=TOKENS - len(tokens),
        )
        for key, tokens in delivered.items()
    ]
    continued = run(checkpoint, *rest).token_ids
    assert all([*delivered[key], *continued[key]] == whole.token_ids[key] for key in range(4))


def test_reasoning_is_free_and_the_answer_after_it_constrained(checkpoint: Path, texts: Texts) -> None:
    (close,) = texts.ids("</think>")
    constraint = Constraint(JSON.grammar, free_until=close)
    # Without this bias the random model would rarely close its thoughts.
    samplings = [Sampling(temperature=1.0, seed=seed, logit_bias={close: 9.0}) for seed in range(4)]
    submits = [constrained(key, constraint, sampling=sampling) for key, sampling in enumerate(samplings)]
    answers = run(checkpoint, *submits).token_ids.values()
    thoughts = [answer.index(close) for answer in answers]
    assert max(thoughts) > 0
    assert all(valid(texts.of(answer[thought + 1 :])) for answer, thought in zip(answers, thoughts, strict=True))


def test_an_answer_cannot_end_in_its_thoughts(checkpoint: Path, texts: Texts) -> None:
    (close,) = texts.ids("</think>")
    eager = Sampling(logit_bias={1: 100.0})
    transcript = run(checkpoint, constrained(0, Constraint(JSON.grammar, free_until=close), sampling=eager))
    assert transcript.ends[0].finish is FinishReason.LENGTH
    assert 1 not in transcript.token_ids[0]


@pytest.mark.parametrize("opens", [True, False])
def test_the_first_token_decides_whether_there_are_thoughts(checkpoint: Path, texts: Texts, opens: bool) -> None:
    (opening,), (close,) = texts.ids("<think>"), texts.ids("</think>")
    constraint = Constraint('start: "yes" | "no"', free_until=close, opened_by=opening)
    bias = {opening: 100.0, close: 99.0} if opens else {opening: -100.0}
    sampling = Sampling(temperature=1.0, seed=4, logit_bias=bias)
    tokens = run(checkpoint, constrained(0, constraint, sampling=sampling)).token_ids[0]
    assert (tokens[0] == opening) == opens
    answer = tokens[tokens.index(close) + 1 :] if opens else tokens
    assert texts.of(answer) in ("yes", "no")


@pytest.mark.parametrize("grammar", [r"start: /[0-9]{3}-[a-f]{2}/", 'start: "a" start "b" | "c"'])
def test_expressions_and_grammars_constrain_as_well(checkpoint: Path, texts: Texts, grammar: str) -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    answer = texts.of(run(checkpoint, constrained(0, Constraint(grammar), sampling=sampling)).token_ids[0])
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}|(a*)c(b*)", answer)


def test_a_grammar_that_is_none_refuses_its_request_alone(checkpoint: Path) -> None:
    transcript = run(checkpoint, constrained(0, Constraint("start: nothing")), free(1))
    refusal = transcript.ends[0].refusal
    assert refusal is not None and refusal.reason == "INVALID_CONSTRAINT"
    assert len(transcript.token_ids[1]) == FREE_TOKENS


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_mask_that_takes_too_long_ends_its_answer_alone(checkpoint: Path, texts: Texts, overlap: str) -> None:
    # With every "a" there are more ways to go on.
    grammar = Constraint("start: /(.*a.{0,300}){40}b.{500}/")
    sampling = Sampling(logit_bias=dict.fromkeys(texts.ids("a"), 100.0))
    transcript = run(checkpoint, constrained(0, grammar, sampling=sampling), free(1), overlap=overlap)
    refusal = transcript.ends[0].refusal
    assert refusal is not None and refusal.reason == "INVALID_CONSTRAINT"
    assert "cannot be followed" in refusal.message
    assert len(transcript.token_ids[1]) == FREE_TOKENS


def test_an_answer_that_became_too_complex_spoils_no_later_one(checkpoint: Path, texts: Texts) -> None:
    grammar = Constraint("start: /(.*a.{0,300}){40}b.{500}/")
    engine = ConstrainedEngine(checkpoint)
    refused, simple = (Sampling(logit_bias=dict.fromkeys(texts.ids(text), 100.0)) for text in "ab")
    assert engine.run(constrained(0, grammar, sampling=refused)).ends[0].refusal is not None
    assert engine.run(constrained(1, grammar, sampling=simple, max_tokens=5)).ends[1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_an_answer_that_gets_too_complex_ends_no_other(checkpoint: Path, texts: Texts, overlap: str) -> None:
    grammar = Constraint("start: /(.*a.{0,300}){40}b.{500}/")
    complex_one, simple = (Sampling(logit_bias=dict.fromkeys(texts.ids(text), 100.0)) for text in "ab")
    engine = ConstrainedEngine(checkpoint, overlap=overlap)
    prompt = random_prompt(60, seed=1)
    found = engine.run(
        constrained(0, grammar, sampling=complex_one),
        constrained(1, grammar, sampling=simple, prompt=prompt),
    )
    refusals = [found.ends[key].refusal for key in (0, 1)]
    assert [refusal and refusal.reason for refusal in refusals] == ["INVALID_CONSTRAINT", "GRAMMAR_SPENT"]
    # Continue as the gateway does: no token is lost or repeated.
    delivered = found.token_ids[1]
    rest = constrained(
        1,
        grammar,
        sampling=simple,
        prompt=[*prompt, *delivered],
        prompt_tokens=len(prompt),
        max_tokens=TOKENS - len(delivered),
    )
    continued = engine.run(rest)
    assert continued.ends[1].finish is FinishReason.LENGTH
    alone = ConstrainedEngine(checkpoint).run(constrained(1, grammar, sampling=simple, prompt=prompt))
    assert [*delivered, *continued.token_ids[1]] == alone.token_ids[1]


class Panic(BaseException):
    """Like a Rust panic in Python, which is not an Exception."""


@pytest.mark.parametrize("where", ["masks", "advance"])
@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_grammar_that_fails_unexpectedly_ends_its_answer_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    right = getattr(ConstrainedAnswer, where)

    def fail_later(answer: ConstrainedAnswer, *arguments: object) -> object:
        if answer._place.tokens >= 5:
            raise error("a bug of the grammars' library")
        return right(answer, *arguments)

    monkeypatch.setattr(ConstrainedAnswer, where, fail_later)
    transcript = run(checkpoint, constrained(0), free(1))
    refusal = transcript.ends[0].refusal
    assert refusal is not None and refusal.reason == "INVALID_CONSTRAINT"
    assert error.__name__ in refusal.message
    assert len(transcript.token_ids[1]) == FREE_TOKENS


def test_a_panic_of_the_compiler_refuses_one_request_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> None:
        raise Panic

    monkeypatch.setattr("engine.constraints.constraints.compile_grammar", panic)
    transcript = run(checkpoint, constrained(0), free(1))
    refusal = transcript.ends[0].refusal
    assert refusal is not None and refusal.reason == "INVALID_CONSTRAINT"
    assert len(transcript.token_ids[1]) == FREE_TOKENS


def test_a_request_may_be_cancelled_while_its_grammar_is_compiled(checkpoint: Path) -> None:
    constrained_engine = ConstrainedEngine(checkpoint)
    constrained_engine.engine.submit(constrained(0))
    constrained_engine.engine.cancel(Cancel(0))
    transcript = Transcript().run(constrained_engine.engine)
    assert transcript.ends[0].finish is FinishReason.CANCELLED
    assert_at_rest(constrained_engine.engine)


def test_no_step_waits_for_a_cancelled_requests_grammar(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = threading.Event()

    def compile_late(*_: object) -> None:
        compiles.wait()
        raise InvalidConstraint("no request asks for it any more")

    monkeypatch.setattr("engine.constraints.constraints.compile_grammar", compile_late)
    engine = ConstrainedEngine(checkpoint).engine
    engine.submit(constrained(0))
    engine.cancel(Cancel(0))
    engine.submit(free(1))
    try:
        transcript = Transcript().run(engine)
    finally:
        compiles.set()
    assert len(transcript.token_ids[1]) == FREE_TOKENS


def test_an_answer_has_its_least_tokens_before_it_ends(checkpoint: Path) -> None:
    eager = Sampling(logit_bias={1: 100.0})
    for overlap in ("on", "off"):
        transcript = run(checkpoint, constrained(0, Constraint(min_tokens=9), sampling=eager), overlap=overlap)
        # The tenth token is the end.
        assert len(transcript.token_ids[0]) == 10
        assert transcript.ends[0].finish is FinishReason.STOP


@pytest.mark.parametrize("mode", MODES)
def test_banned_sequences_never_stand_in_an_answer(checkpoint: Path, mode: str) -> None:
    plain = run(checkpoint, constrained(0, Constraint(), sampling=Sampling(), ignore_eos=True), overlap="off")
    tokens = plain.token_ids[0]
    banned = [tokens[3:5], tokens[10:11]]
    constraint = Constraint(banned=banned)
    others = run(checkpoint, constrained(0, constraint, sampling=Sampling(), ignore_eos=True), free(4), **MODES[mode])
    answer = others.token_ids[0]
    assert answer[:3] == tokens[:3] and len(answer) == TOKENS
    assert banned[1][0] not in answer
    assert all(answer[place : place + 2] != banned[0] for place in range(len(answer)))


def test_the_end_of_a_grammar_goes_before_the_least_tokens(checkpoint: Path, texts: Texts) -> None:
    transcript = run(checkpoint, constrained(0, Constraint('start: "yes"', min_tokens=50)))
    assert texts.of(transcript.token_ids[0]) == "yes"


def test_the_next_engine_of_a_process_reads_no_tokenizer(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ConstrainedEngine(checkpoint)
    first = engine.run(constrained(1)).token_ids[1]
    monkeypatch.delattr("engine.constraints.constraints.load_grammar_tokenizer")
    engine.begin_again()
    assert engine.run(constrained(1)).token_ids[1] == first
