import math
from typing import Any

import pytest

from gateway.requests import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    ModelLimits,
    Sampling,
    completion_room,
    validate_sampling,
    validate_stops,
    validate_text,
    validate_token_ids,
)
from mesh.errors import ContextExceeded, InvalidRequest

LIMITS = ModelLimits(context_tokens=100, vocabulary_size=50)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, 101.0, math.nan, math.inf, -math.inf)],
        *[("top_p", value) for value in (0.0, -1.0, 1.5, math.nan)],
        *[("top_k", value) for value in (-1, 2**31)],
        *[("top_logprobs", value) for value in (-1, 21)],
    ],
)
def test_sampling_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    values: dict[str, Any] = {"temperature": 1.0, "seed": 0, field: value}
    with pytest.raises(InvalidRequest, match=f"^{field} must be") as caught:
        validate_sampling(Sampling(**values))
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"top_logprobs": 0}])
def test_sampling_at_the_edges_is_taken(changes: dict[str, Any]) -> None:
    validate_sampling(Sampling(**{"temperature": 100.0, "seed": 2**64 - 1, **changes}))


def test_without_max_tokens_the_context_is_the_limit() -> None:
    assert completion_room(40, None, LIMITS) == 60


def test_prompt_and_max_tokens_may_fill_the_context() -> None:
    assert completion_room(40, 60, LIMITS) == 60


def test_prompt_and_max_tokens_over_the_context_are_refused_with_what_would_fit() -> None:
    with pytest.raises(ContextExceeded, match="ask for at most 60"):
        completion_room(40, 61, LIMITS)


@pytest.mark.parametrize("prompt_tokens", [100, 101, 5000])
def test_a_prompt_that_leaves_no_room_is_refused(prompt_tokens: int) -> None:
    with pytest.raises(ContextExceeded, match="leaves no room"):
        completion_room(prompt_tokens, None, LIMITS)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_fewer_than_one_token_cannot_be_asked_for(max_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        completion_room(1, max_tokens, LIMITS)


@pytest.mark.parametrize(("token_ids", "said"), [([1, 50], "below 50"), ([-1], "not negative")])
def test_token_ids_out_of_range_are_refused(token_ids: list[int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        validate_token_ids(token_ids, LIMITS, field="prompt")


def test_token_ids_must_fit_the_wire_where_the_vocabulary_is_unknown() -> None:
    with pytest.raises(InvalidRequest, match="below 4294967296"):
        validate_token_ids([2**32], ModelLimits(100, None), field="prompt")


@pytest.mark.parametrize(
    "strings",
    [["a"] * (MAX_STOP_STRINGS + 1), [""], ["a" * (MAX_STOP_CHARACTERS + 1)], ["\udc00"]],
    ids=["too many", "empty", "too long", "surrogate"],
)
def test_bad_stop_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop") as caught:
        validate_stops(strings, [], LIMITS)
    assert caught.value.metadata["field"] == "stop"


@pytest.mark.parametrize("token_ids", [[50], [1] * 257], ids=["unknown", "too many"])
def test_bad_stop_token_ids_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        validate_stops([], token_ids, LIMITS)


def test_a_lone_surrogate_is_located() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at 2"):
        validate_text("ab\ud800", field="prompt")
