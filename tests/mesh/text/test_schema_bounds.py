"""JSON schemas that would keep a compiler busy for long."""

import json
from typing import Any

import pytest

from mesh.errors import InvalidConstraint
from mesh.text.schema_bounds import MOST_EXPRESSIONS, MOST_OPTIONAL, check_schemas, remainders

TEXT = {"type": "string"}
FORMS = {
    "lark": 'start: "a" answer\nanswer: %json {}',
    "json": '{{"grammars": [{{"json_schema": {}}}]}}',
}


def check(form: str, schema: dict[str, Any]) -> None:
    check_schemas(
        FORMS[form].format(json.dumps(schema)) if form == "json" else FORMS[form].replace("{}", json.dumps(schema))
    )


def expressions(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^k{index}$": TEXT for index in range(count)}}


def optional(*runs: int) -> dict[str, Any]:
    """An object with runs of optional properties, after each of which one is required."""
    names = [[f"p{run}.{index}" for index in range(length)] for run, length in enumerate(runs)]
    properties = {name: TEXT for run, several in enumerate(names) for name in (*several, f"needed{run}")}
    return {"type": "object", "properties": properties, "required": [f"needed{run}" for run in range(len(runs))]}


@pytest.mark.parametrize("form", FORMS)
def test_expressions_of_a_whole_schema_are_counted(form: str) -> None:
    half = MOST_EXPRESSIONS // 2
    check(form, {"anyOf": [expressions(half), {"items": expressions(half)}]})
    with pytest.raises(InvalidConstraint, match=f"{MOST_EXPRESSIONS + 1} patternProperties"):
        check(form, {"anyOf": [expressions(half), {"items": expressions(half + 1)}]})


@pytest.mark.parametrize("form", FORMS)
def test_optional_properties_in_a_row_are_counted(form: str) -> None:
    check(form, optional(MOST_OPTIONAL, MOST_OPTIONAL))
    with pytest.raises(InvalidConstraint, match=f"{MOST_OPTIONAL + 1} optional properties"):
        check(form, {"items": optional(1, MOST_OPTIONAL + 1)})


def multiples(*numbers: float) -> dict[str, Any]:
    return {"anyOf": [{"type": "number", "multipleOf": number} for number in numbers]}


@pytest.mark.parametrize(
    ("numbers", "needed"),
    [
        ((86_400,), 864),
        ((0.01, 1e-9, 1e15, -0.25), 25),
        ((4, 6, 10.0), 12),
        ((49_999,), 49_999),
        # Neither is what the library takes, and it says so at once.
        ((0, 10**400), 1),
    ],
)
def test_multiples_that_can_be_followed_are_taken(numbers: tuple[float, ...], needed: int) -> None:
    check("lark", multiples(*numbers))
    assert remainders(multiples(*numbers)) == needed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numbers", [(50_021,), (2**31,), (-(2**31),), (21474836.48,), (251, 257)], ids=str)
def test_multiples_with_many_remainders_are_refused(form: str, numbers: tuple[float, ...]) -> None:
    with pytest.raises(InvalidConstraint, match="multipleOf have a common multiple beyond 50000"):
        check(form, multiples(*numbers))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["a"] * 600, "multipleOf": "7"},
        {"properties": dict.fromkeys(map(str, range(600)), True), "required": None},
    ],
    ids=["no object", "nothing required"],
)
def test_malformed_keywords_raise_nothing_unexpected(schema: dict[str, Any]) -> None:
    try:
        check("lark", schema)
    except InvalidConstraint as refused:
        assert "600 optional properties" in refused.message


def test_the_least_number_that_a_refusal_names_is_taken() -> None:
    with pytest.raises(InvalidConstraint) as refused:
        check("lark", {"minimum": -(2**62) + 1})
    check("lark", {"minimum": int(refused.value.message.rpartition(" ")[2])})
