import math
from typing import Any

import pytest

from mesh.domain.sampling import (
    DraftUse,
    Sampling,
    check_sampling,
    check_stop_token_ids,
    check_token_ids,
    settled_draft_use,
)
from mesh.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, 101.0, math.nan, math.inf, -math.inf)],
        *[("top_p", value) for value in (0.0, -1.0, 1.5, math.nan)],
        *[("top_k", value) for value in (-1, 2**31)],
        *[("top_logprobs", value) for value in (-1, 21)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, math.nan)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, math.inf)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, 100.5, math.nan)],
        *[("drafts", value) for value in (-1, 4)],
    ],
)
def test_sampling_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    values: dict[str, Any] = {"temperature": 1.0, "seed": 0, field: value}
    with pytest.raises(InvalidRequest, match=f"^{field} must be") as caught:
        check_sampling(Sampling(**values), 50)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"top_logprobs": 0},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.01},
        {"logit_bias": {0: -100.0, 49: 100.0}},
    ],
)
def test_sampling_at_the_edges_is_taken(changes: dict[str, Any]) -> None:
    check_sampling(Sampling(**{"temperature": 100.0, "seed": 2**64 - 1, **changes}), 50)


@pytest.mark.parametrize(("token_ids", "said"), [([1, 50], "below 50"), ([-1], "not negative")])
def test_token_ids_out_of_range_are_refused(token_ids: list[int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_token_ids(token_ids, 50, field="prompt")


def test_token_ids_of_an_unknown_vocabulary_must_fit_the_wire() -> None:
    with pytest.raises(InvalidRequest, match="below 4294967296"):
        check_token_ids([2**32], None, field="prompt")


@pytest.mark.parametrize("token_ids", [[50], [1] * 257], ids=["unknown", "too many"])
def test_bad_stop_token_ids_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        check_stop_token_ids(token_ids, 50)


@pytest.mark.parametrize(
    ("logit_bias", "said"),
    [
        ({50: 1.0}, "below 50"),
        ({-1: 1.0}, "not negative"),
        ({7: 100.5}, "of token 7 must be between -100 and 100"),
        ({7: math.nan}, "of token 7"),
        (dict.fromkeys(range(301), 0.0), "the limit is 300"),
    ],
)
def test_a_bad_logit_bias_is_refused(logit_bias: dict[int, float], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        check_sampling(Sampling(logit_bias=logit_bias), 50)
    assert caught.value.metadata["field"] == "logit_bias"


@pytest.mark.parametrize(
    ("changes", "constrained", "expected"),
    [
        ({}, False, DraftUse.RELAXED),
        ({}, True, DraftUse.STRICT),
        ({"presence_penalty": 0.5}, False, DraftUse.STRICT),
        ({"repetition_penalty": 1.1}, False, DraftUse.STRICT),
        ({"logit_bias": {1: 2.0}}, False, DraftUse.STRICT),
        ({"drafts": DraftUse.OFF}, False, DraftUse.OFF),
        ({"drafts": DraftUse.RELAXED, "presence_penalty": 0.5}, True, DraftUse.RELAXED),
    ],
)
def test_relaxed_drafts_suit_a_request_or_are_asked_for(
    changes: dict[str, Any], constrained: bool, expected: DraftUse
) -> None:
    assert settled_draft_use(Sampling(**changes), constrained) is expected
