"""The result of an evaluation: scores to read, and every outcome, so that two results can be compared by problem."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from eval.answers import Answer, DocumentScore, Ending
from eval.statistics import wilson
from eval.suite import Question
from mesh.errors import ConfigError

# The group of all questions together.
ALL = "all"


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """An answer without its text."""

    question: str
    digest: str
    right: bool
    ending: Ending
    prompt_tokens: int
    answer_tokens: int

    @property
    def group(self) -> str:
        return self.question.rpartition("/")[0]


class Score(msgspec.Struct, frozen=True):
    """Exact match over one group; `low` and `high` bound the share with 95% confidence (Wilson)."""

    group: str
    right: int
    total: int
    low: float
    high: float
    # Answers cut off at max_tokens, and questions that the endpoint would not take; both count as wrong.
    cut_off: int
    refused: int
    # Means over the questions that the endpoint did not refuse.
    mean_prompt_tokens: float
    mean_answer_tokens: float

    @property
    def share(self) -> float:
        return self.right / self.total


class Perplexity(msgspec.Struct, frozen=True):
    """`value`: exp of the mean negative log likelihood of a token of held-out text."""

    value: float
    tokens: int
    documents: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation. `perplexity` is None if it was not asked for or not offered; `without_perplexity` says why."""

    name: str
    # The endpoint's name for the model.
    model: str
    settings: dict[str, Any]
    scores: list[Score]
    perplexity: Perplexity | None
    without_perplexity: str | None = None
    outcomes: list[Outcome]
    documents: list[DocumentScore]


def outcomes_of(questions: Iterable[Question], answers: Mapping[str, Answer]) -> list[Outcome]:
    """The outcomes in the order of the questions, in whatever order the answers arrived."""
    found = [answers[question.id] for question in questions]
    return [Outcome(a.question, a.digest, a.right, a.ending, a.prompt_tokens, a.answer_tokens) for a in found]


def scores_of(outcomes: Sequence[Outcome]) -> list[Score]:
    """A score for each group in the order of appearance, then one for all questions."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.group, []).append(outcome)
    return [*(_score(name, members) for name, members in groups.items()), _score(ALL, outcomes)]


def _score(group: str, outcomes: Sequence[Outcome]) -> Score:
    right = sum(outcome.right for outcome in outcomes)
    interval = wilson(right, len(outcomes))
    taken = [outcome for outcome in outcomes if outcome.ending != "refused"]
    return Score(
        group=group,
        right=right,
        total=len(outcomes),
        low=interval.low,
        high=interval.high,
        cut_off=sum(outcome.ending == "length" for outcome in outcomes),
        refused=len(outcomes) - len(taken),
        mean_prompt_tokens=fmean(outcome.prompt_tokens for outcome in taken) if taken else 0.0,
        mean_answer_tokens=fmean(outcome.answer_tokens for outcome in taken) if taken else 0.0,
    )


def perplexity_of(documents: Sequence[DocumentScore]) -> Perplexity | None:
    """The perplexity over all tokens of the documents; None if there are none."""
    tokens = sum(document.tokens for document in documents)
    if tokens == 0:
        return None
    nats = sum(document.negative_log_likelihood for document in documents)
    return Perplexity(exp(nats / tokens), tokens, len(documents))


def save(result: Result, path: Path) -> None:
    """Write the result as JSON with one outcome a line. `load` reads it back."""
    outer = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(result, outcomes=[])), indent=1)
    rows = b",\n  ".join(msgspec.json.encode(outcome) for outcome in result.outcomes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(outer.replace(b'"outcomes": []', b'"outcomes": [\n  ' + rows + b"\n ]", 1) + b"\n")


def load(path: Path) -> Result:
    """Read a result. Raises ConfigError if `path` holds none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no result of deepmesh eval: {error}") from error
