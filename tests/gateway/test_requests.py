import pytest

from gateway.requests import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    FieldNames,
    ModelLimits,
    completion_room,
    validate_stop_strings,
    validate_text,
)
from mesh.errors import ContextExceeded, InvalidRequest

LIMITS = ModelLimits(context_tokens=100, vocabulary_size=50)


def test_without_max_tokens_the_context_is_the_limit() -> None:
    assert completion_room(40, None, LIMITS) == 60


def test_prompt_and_max_tokens_may_fill_the_context() -> None:
    assert completion_room(40, 60, LIMITS) == 60


def test_exceeding_the_context_names_what_would_fit() -> None:
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


@pytest.mark.parametrize(
    "strings",
    [["a"] * (MAX_STOP_STRINGS + 1), [""], ["a" * (MAX_STOP_CHARACTERS + 1)], ["\udc00"]],
    ids=["too many", "empty", "too long", "surrogate"],
)
def test_bad_stop_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop") as caught:
        validate_stop_strings(strings)
    assert caught.value.metadata["field"] == "stop"


def test_a_lone_surrogate_is_located() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at 2"):
        validate_text("ab\ud800", field="prompt")


def test_errors_of_messages_name_the_prompt_elsewhere() -> None:
    with pytest.raises(InvalidRequest) as caught, FieldNames(prompt="input", has_messages=False).given():
        raise InvalidRequest("no", field="messages[0].content")
    assert caught.value.metadata == {"field": "input"}


def test_an_error_is_not_its_own_cause() -> None:
    # It would stay in memory with the whole request until Python looks for garbage.
    with pytest.raises(InvalidRequest) as caught, FieldNames().given():
        raise InvalidRequest("no", field="messages[0].content")
    assert (caught.value.metadata, caught.value.__cause__) == ({"field": "messages[0].content"}, None)
