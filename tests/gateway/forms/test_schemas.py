"""Schemas of arguments: what they refuse once closed, and what is left of those that no grammar can enforce."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.forms.answer_forms import compiles, json_rule
from gateway.forms.schema_closing import closed
from gateway.forms.schema_limits import enforceable
from gateway.forms.tool_grammar import arguments_schema
from gateway.tools import Tool
from mesh.errors import InvalidConstraint
from mesh.text.grammars import check_grammar, compile_grammar, load_grammar_tokenizer
from mesh.text.tokenizer_file import read_tokenizer
from tests.support.fake_decode import VOCABULARY
from tests.support.tokenizers import tokenizer_directory

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
TIME = {"type": "object", "properties": {"time": {"enum": ["noon"]}}, "required": ["time"]}
OSLO, NOON, BOTH = {"city": "Oslo"}, {"time": "noon"}, {"city": "Oslo", "time": "noon"}
OTHER = {"city": "Oslo", "x": 1}
# Properties are written in the schema's order.
FIRST = {"x": 1, "city": "Oslo"}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_grammar_tokenizer(read_tokenizer(tokenizer_directory()), VOCABULARY, frozenset([1]))


def takes(schema: Any, value: Any, vocabulary: LLTokenizer) -> bool:
    """Whether the value can be written."""
    matcher: LLMatcher = compile_grammar(vocabulary, f"start: {json_rule(schema, lenient=True)}")
    token_ids = vocabulary.tokenize_str(json.dumps(value))
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and bool(matcher.is_accepting())


# Schemas of a tool's arguments, what can be written of them, and what cannot.
CLOSED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "properties": (CITY, [OSLO], [OTHER, {}]),
    "none": ({}, [{}], [{"x": 1}]),
    "nested": (
        {"properties": {"at": CITY, "all": {"type": "array", "items": CITY}}},
        [{"at": OSLO, "all": [OSLO]}],
        [{"at": OTHER}, {"all": [OTHER]}],
    ),
    "reference": ({"$ref": "#/$defs/A", "$defs": {"A": CITY}}, [OSLO], [OTHER, {}]),
    "nested-reference": (
        {"properties": {"at": {"$ref": "#/$defs/A"}}, "$defs": {"A": CITY}},
        [{"at": OSLO}],
        [{"at": OTHER}],
    ),
    "recursion": (
        {"properties": {"next": {"$ref": "#"}, "city": {"type": "string"}}},
        [{"next": {"next": OSLO}}],
        [{"next": {"x": 1}}],
    ),
    "alternatives": ({"type": "object", "anyOf": [CITY, TIME]}, [OSLO, NOON], [OTHER, {}]),
    "alternatives-one": ({"oneOf": [CITY, TIME]}, [OSLO, NOON], [OTHER]),
    "alternatives-with-properties": ({"properties": {"x": {}}, "anyOf": [CITY, TIME]}, [FIRST], [{"x": 1}]),
    "remote": ({"$ref": "https://example.com/a.json"}, [OTHER], [3]),
    "remote-with-properties": ({"$ref": "other.json", **CITY}, [OTHER], [{}]),
    "all": ({"allOf": [CITY, TIME]}, [BOTH], [OSLO]),
    "all-of-references": ({"allOf": [{"$ref": "#/$defs/A"}, TIME], "$defs": {"A": CITY}}, [BOTH], [OSLO]),
    "reference-with-properties": (
        {"$ref": "#/$defs/A", "properties": {"x": {"type": "integer"}}, "$defs": {"A": CITY}},
        [OTHER],
        [{"x": 1}],
    ),
    "all-with-nested": (
        {"allOf": [{"properties": {"at": CITY}}, {"properties": {"at": TIME}}]},
        [{"at": BOTH}],
        [{"at": OSLO}],
    ),
    "condition": ({"properties": {"x": {}}, "if": {"required": ["x"]}, "then": CITY}, [FIRST], []),
    "dependent": ({"properties": {"x": {}}, "dependentSchemas": {"x": TIME}}, [{"x": 1, "time": "noon"}], []),
    "required-name": ({"properties": {"x": {}}, "required": ["y"]}, [{"y": 1}, {"x": 1, "y": 2}], [{"x": 1}]),
    "size": ({"properties": {"x": {}}, "minProperties": 2}, [{"x": 1, "y": 2}], []),
    "open": ({"properties": {"x": {}}, "additionalProperties": True}, [{"y": 1}], []),
    "patterns": ({"properties": {}, "patternProperties": {"^y": {}}}, [{"y": 1}], []),
}


@pytest.mark.parametrize("case", CLOSED)
def test_a_schema_is_closed_where_that_changes_nothing_else(case: str, vocabulary: LLTokenizer) -> None:
    schema, right, wrong = CLOSED[case]
    arguments = arguments_schema(Tool("t", "", enforceable(schema, compiles)))
    assert [value for value in right if not takes(arguments, value, vocabulary)] == []
    assert [value for value in wrong if takes(arguments, value, vocabulary)] == []


def test_a_chain_of_references_of_any_length_is_followed() -> None:
    definitions: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)}
    schema = closed({"$ref": "#/$defs/d0", "$defs": {**definitions, "d5000": CITY}})
    assert schema["$defs"]["d5000"]["additionalProperties"] is False


TEXT = {"type": "string"}
# Schemas of which a part cannot be enforced, what can be written without it, and what still cannot.
LIMITED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "look-ahead": ({**TEXT, "pattern": "^(?!0)[0-9]{2}$"}, ["12"], [3]),
    "look-behind": ({**TEXT, "pattern": "(?<=a)b"}, ["ab"], [3]),
    "end-of-text": ({**TEXT, "pattern": r"^a\Z"}, ["a"], [3]),
    "back-reference": ({**TEXT, "pattern": r"(a)\1"}, ["aa"], [3]),
    "word-boundary": ({**TEXT, "pattern": r"\bfoo\b"}, ["foo"], [3]),
    "invalid-expression": ({**TEXT, "pattern": "("}, ["("], [3]),
    "pattern-no-text": ({**TEXT, "pattern": 3}, ["x"], [3]),
    "remote": ({"properties": {"a": {"$ref": "https://example.com/a.json"}, "b": TEXT}}, [{"a": 3}], [{"b": 3}]),
    "dangling": ({"properties": {"a": {"$ref": "#/$defs/none"}, "b": TEXT}}, [{"a": 3}], [{"b": 3}]),
    "unknown-type": ({"properties": {"a": {"type": "date"}, "b": TEXT}}, [{"a": 3}], [{"b": 3}]),
    "unknown-among-types": ({"properties": {"a": {"type": ["date", "null"]}, "b": TEXT}}, [{"a": 3}], [{"b": 3}]),
    "draft-3-required": ({"properties": {"a": {**TEXT, "required": True}}}, [{"a": "x"}, {}], [{"a": 3}]),
    "wrong-bound": ({"type": "integer", "minimum": "3"}, [1], ["1"]),
    "boolean-bound": ({"type": "integer", "exclusiveMinimum": True, "minimum": 0}, [0], ["1"]),
    "tiny-bound": ({"type": "number", "minimum": 1e-300}, [1], ["1"]),
    "long-multiple": ({"type": "number", "multipleOf": 123456789.123}, [1], ["1"]),
    "multiples-of-millions": (
        {"anyOf": [{"type": "integer", "multipleOf": 997 * each} for each in (1009, 2)]},
        [1],
        [],
    ),
    "huge-constant": ({"enum": [-1e30, 1]}, [3, "x"], []),
    "huge-example": ({"type": "integer", "examples": [-1e30], "default": -1e30}, [1], ["1"]),
    "huge-bound": ({"type": "integer", "minimum": -1e40}, [1], ["1"]),
    "huge-const": ({"type": "integer", "const": 2**70}, [2**70, 1], ["1"]),
    "huge-enum": ({"type": "integer", "enum": [2**53 + 1, 2**53]}, [2**53 + 1, 1], ["1"]),
    "schema-of-another-kind": ({**TEXT, "$schema": "https://example.com/own"}, ["x"], [3]),
    "property-expression": (
        {"patternProperties": {"^(?=a)": TEXT, "^b": TEXT}, "additionalProperties": False},
        [{"a": 3}, {"b": "x"}],
        [{"b": 3}],
    ),
    "inside-alternatives": ({"anyOf": [{"type": "date"}, {"type": "null"}]}, [None, 3], []),
    "anchor": ({"$ref": "#x", "$defs": {"A": {"$anchor": "x", **TEXT}}}, ["x"], [3]),
}


@pytest.mark.parametrize("case", LIMITED)
def test_only_what_cannot_be_enforced_is_left_out(case: str, vocabulary: LLTokenizer) -> None:
    schema, right, wrong = LIMITED[case]
    kept = enforceable(schema, compiles)
    check_grammar(f"start: {json_rule(kept, lenient=True)}")
    assert [value for value in right if not takes(kept, value, vocabulary)] == []
    assert [value for value in wrong if takes(kept, value, vocabulary)] == []


@pytest.mark.parametrize("number", [2**70, -(2**63), 2**53 + 1])
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_strict_number_that_would_be_rounded_is_named(keyword: str, number: int) -> None:
    value: Any = {"a": [number]} if keyword == "const" else [number]
    with pytest.raises(InvalidConstraint, match=f"{keyword} has {number}"):
        json_rule({"properties": {"b": {keyword: value}}}, lenient=False)


LEAST = -(2**63)
ENDING = {
    "const": {"const": LEAST},
    "both bounds": {"type": "integer", "minimum": LEAST, "maximum": LEAST},
    "bounds with a point": {"type": "integer", "minimum": -9.3e18, "maximum": -9.3e18},
}


@pytest.mark.parametrize("case", ENDING)
@pytest.mark.parametrize("form", ["start: %json {}", '{{"grammars": [{{"json_schema": {}}}]}}'], ids=["lark", "json"])
def test_a_number_that_ends_the_process_is_refused(case: str, form: str) -> None:
    schema = json.dumps(ENDING[case])
    with pytest.raises(InvalidConstraint, match="a schema has the number -9"):
        check_grammar(form.replace("{}", schema) if form.startswith("start") else form.format(schema))


def test_a_schema_that_can_be_enforced_stays_as_it_is() -> None:
    schema = {"$defs": {"A": CITY}, "$ref": "#/$defs/A", "properties": {"x": {**TEXT, "pattern": "^a+$"}}}
    assert enforceable(schema, compiles) == schema
