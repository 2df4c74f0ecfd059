"""How short JSON of a schema can be, in characters."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.forms.shortest_json import MAX_CHARACTERS, shortest_json

INTEGER = {"type": "integer"}
PAIR = {"type": "object", "properties": {"a": INTEGER, "bc": {"type": "string"}}, "required": ["bc", "a"]}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}},
    "$ref": "#/$defs/node",
}
SHORTEST: list[tuple[dict[str, Any], str]] = [
    ({}, "0"),
    (INTEGER, "0"),
    ({"type": "string"}, '""'),
    ({"type": "string", "minLength": 4}, '"aaaa"'),
    ({"type": ["string", "null", "boolean"]}, '""'),
    ({"const": {"a": [1, 2]}}, '{"a":[1,2]}'),
    ({"type": "string", "enum": ["red", "green"]}, '"red"'),
    (PAIR, '{"bc":"","a":0}'),
    ({**PAIR, "required": []}, "{}"),
    ({"type": "object", "required": ["unknown"]}, '{"unknown":0}'),
    ({**PAIR, "required": ["a", "a", ["b"]]}, '{"a":0}'),
    ({"type": "array"}, "[]"),
    ({"type": "array", "items": PAIR, "minItems": 2}, '[{"bc":"","a":0},{"bc":"","a":0}]'),
    ({"type": "array", "prefixItems": [{"type": "boolean"}], "items": INTEGER, "minItems": 3}, "[true,0,0]"),
    ({"anyOf": [PAIR, {"type": "null"}]}, "null"),
    ({"allOf": [PAIR, {"type": "object", "required": ["a"]}]}, '{"bc":"","a":0}'),
    ({"$ref": "#/$defs/p", "$defs": {"p": PAIR}}, '{"bc":"","a":0}'),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "boolean"}}}, "true"),
    ({"$ref": "https://example.org/elsewhere"}, "0"),
    ({**PAIR, "properties": {"bc": {"$ref": "#flag"}}, "$defs": {"f": {"$anchor": "flag"}}}, '{"bc":0,"a":0}'),
    # It has no end, and so no shortest one.
    (TREE, '{"next":0}'),
    # Keywords that are none.
    ({"type": "object", "required": 5, "properties": []}, "{}"),
    ({"type": "array", "minItems": "many", "prefixItems": 1}, "[]"),
    ({"enum": 3, "anyOf": {}, "$ref": 1}, "0"),
]


@pytest.mark.parametrize(("schema", "text"), SHORTEST)
def test_it_is_as_long_as_what_the_schema_asks_for(schema: dict[str, Any], text: str) -> None:
    assert shortest_json(schema, len) == len(text)


def test_alternatives_are_compared_in_tokens() -> None:
    # One word has many characters and is one token.
    schema = {"enum": ["internationalization", "xqzj"]}
    assert shortest_json(schema, lambda text: 3 if "inter" in text else len(text)) == 3


def nested(levels: int) -> dict[str, Any]:
    """10**levels items."""
    schema: dict[str, Any] = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 10}
    return schema


def test_long_texts_are_cut_off() -> None:
    assert shortest_json(nested(3), len) == 2221
    for schema in (nested(50), {"type": "array", "minItems": 10**12}, {"type": "string", "minLength": 10**12}):
        assert MAX_CHARACTERS <= shortest_json(schema, len) <= MAX_CHARACTERS + 100


def test_what_would_take_too_much_work_is_not_known() -> None:
    long = {"type": "array", "items": INTEGER, "minItems": MAX_CHARACTERS}
    counted = list[str]()

    def tokens(text: str) -> int:
        counted.append(text)
        return len(text)

    assert shortest_json({"anyOf": [long for _ in range(1000)]}, tokens) == 0
    assert sum(map(len, counted)) < 1_000_000
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)}
    assert shortest_json({"$ref": "#/$defs/d0", "$defs": chain}, len) == 1


def member(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": ["object"], "properties": {"x": schema}, "required": ["x"]}


def first_item(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": ["array"], "prefixItems": [schema], "minItems": 1}


def alternative(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"allOf": [schema]}]}


@pytest.mark.parametrize("level", [member, first_item, alternative])
def test_a_schema_may_be_deeper_than_pythons_stack(level: Callable[..., dict[str, Any]]) -> None:
    schemas = {f"d{n}": level({"$ref": f"#/$defs/d{n + 1}"}) for n in range(500)}
    assert 0 < shortest_json({"$ref": "#/$defs/d0", "$defs": schemas}, len) < 1000
