"""The calls of DeepSeek-V3.2: their arguments read as JSON, written, and held to their schema."""

import json
import re
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from gateway.forms.tool_grammar import ToolGrammar
from gateway.text.signs import NO_SIGNS, Signs
from gateway.tool_formats.choice import format_of
from gateway.tool_formats.deepseek import V31
from gateway.tool_formats.dsml import V32
from gateway.tool_formats.dsml_reader import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    DSML,
    PARAMETER_BEGIN,
    PARAMETER_END,
)
from gateway.tool_formats.interface import ToolFormat
from gateway.tools import Tool, Toolbox, ToolCall
from mesh.errors import InvalidConstraint
from mesh.text.grammars import check_grammar, compile_grammar, load_grammar_tokenizer
from mesh.text.tokenizer_file import read_tokenizer
from tests.support.fake_decode import VOCABULARY
from tests.support.read_calls import read_calls
from tests.support.tokenizers import tokenizer_directory

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "n"},
        "any": {},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
TOOLS = {"weather": SCHEMA, "clock": {}}
ARGUMENTS = {"city": 'Os"lo\n5</b>', "days": 3, "unit": "C", "at": {"x": 1.5}, "note": None, "any": ["<b>"]}
# Any token of the tests' vocabulary can stand for the marker.
TOKEN = 2
SIGNS = pytest.mark.parametrize("signs", [Signs([DSML], {DSML: TOKEN}.get), NO_SIGNS], ids=["token", "letters"])


def read(pieces: list[str], signs: Signs, opening: str = "", parallel: bool = True) -> tuple[str, list[ToolCall]]:
    """Content and calls."""
    return read_calls(V32.reader(signs, parallel, lambda: "id", TOOLS), pieces, signs, opening)


def parameter(key: str, attribute: str, value: str) -> str:
    return f'{PARAMETER_BEGIN}{key}"{attribute}>{value}{PARAMETER_END}\n'


def call_of(name: str, *parameters: str) -> str:
    return f'{CALLS_BEGIN}\n{CALL_BEGIN}{name}">\n{"".join(parameters)}{CALL_END}\n{CALLS_END}'


@SIGNS
@given(places=st.sets(st.integers(0, 700)))
def test_arguments_are_read_as_json_however_the_text_is_split(signs: Signs, places: set[int]) -> None:
    calls = [ToolCall("", "weather", json.dumps(ARGUMENTS)), ToolCall("", "clock", "{}")]
    text = signs.signed(f"I look:\n{V32.calls(calls)}\nDone.")
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    content, (weather, clock) = read([text[a:b] for a, b in pairwise(edges)], signs)
    # The empty line before the calls belongs to them.
    assert content == "I look:\n\nDone."
    assert (weather.name, json.loads(weather.arguments)) == ("weather", ARGUMENTS)
    assert (clock.name, clock.arguments) == ("clock", "{}")
    assert V32.calls([weather, clock]) == V32.calls(calls)


def test_text_streams_before_its_end() -> None:
    reader = V32.reader(NO_SIGNS, True, lambda: "id", TOOLS)
    reader.push(f'{CALLS_BEGIN}\n{CALL_BEGIN}weather">\n{PARAMETER_BEGIN}city" string="true">')
    (delta,) = reader.push('Os"</').calls
    assert delta.arguments == r"Os\""


# Those with a schema are the cases of vLLM's tests/tool_parsers/test_deepseekv32_tool_parser.py, and their results.
@pytest.mark.parametrize(
    ("attribute", "written", "schema", "value"),
    [
        ("true", "5", {}, "5"),
        ("false", "5", {}, 5),
        ("false", "true", {}, True),
        ("false", '["a", "b"]', {"type": "array"}, ["a", "b"]),
        ("false", "five", {}, "five"),
        ("false", "[1", {}, "[1"),
        ("true", "", {}, ""),
        ("true", "42", {"type": "integer"}, 42),
        ("true", '{"minutes":2880}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"minutes": 2880}),
        ("true", "null", {"type": ["string", "null"]}, "null"),
        ("false", "null", {"type": ["string", "null"]}, None),
        ("false", "null", {"type": "string"}, "null"),
        ("false", "hello", {"type": ["string", "null"]}, "hello"),
        ("false", "abc", {"type": "integer"}, "abc"),
        (None, "5", {"type": "string"}, "5"),
        (None, "5", {"type": "integer"}, 5),
    ],
)
def test_attribute_and_schema_say_what_a_value_is(
    attribute: str | None, written: str, schema: dict[str, Any], value: Any
) -> None:
    reader = V32.reader(NO_SIGNS, True, lambda: "id", {"t": {"properties": {"a": schema}}})
    given = "" if attribute is None else f' string="{attribute}"'
    calls = reader.push(call_of("t", parameter("a", given, written))).calls
    assert json.loads("".join(delta.arguments for delta in calls)) == {"a": value}


@SIGNS
@pytest.mark.parametrize(
    "text",
    [
        f"see {CALLS_BEGIN} there",
        f"see\n\n{CALLS_BEGIN}\n",
        f"{CALLS_BEGIN}{CALLS_BEGIN}x",
        f"{CALLS_BEGIN}{CALLS_END}",
        f'{CALL_BEGIN}two words">{CALL_END}',
        f"{CALL_BEGIN}{CALL_BEGIN}",
        f"{CALL_END}{PARAMETER_BEGIN}x{PARAMETER_END}{CALLS_END}",
        f"a <｜DS <{DSML}tool_calls>\n",
        CALL_BEGIN + "x" * 2000,
    ],
)
def test_text_that_is_no_call_is_content(signs: Signs, text: str) -> None:
    assert read(list(signs.signed(text)), signs) == (text, [])
    assert read([signs.signed(text)], signs) == (text, [])


def test_a_malformed_call_does_not_swallow_the_next() -> None:
    text = f'{CALLS_BEGIN}\n{CALL_BEGIN}weather">\nwell{call_of("clock").removeprefix(CALLS_BEGIN)}'
    content, calls = read([text], NO_SIGNS)
    assert (content, calls) == ("\nwell\n", [ToolCall("", "weather", "{}"), ToolCall("", "clock", "{}")])


def test_letters_of_a_token_end_no_value() -> None:
    signs = Signs([DSML], {DSML: TOKEN}.get)
    begin, end = V32.calls([ToolCall("", "t", '{"a": "X"}')]).split("X")
    value = f"write {PARAMETER_END}"
    expected = [ToolCall("", "t", json.dumps({"a": value}, ensure_ascii=False))]
    assert read([signs.signed(begin) + value + signs.signed(end)], signs) == ("", expected)


@pytest.mark.parametrize("named", [None, "weather"])
def test_a_call_that_begins_in_the_prompt_goes_on(named: str | None) -> None:
    call = ToolCall("", "weather", '{"days": 3}')
    assert read([V32.calls([call]).removeprefix(V32.opening(named))], NO_SIGNS, V32.opening(named)) == ("", [call])
    assert read(["no, thanks"], NO_SIGNS, V32.opening(named))[0] == "no, thanks"


def test_a_cut_answer_keeps_the_arguments_so_far() -> None:
    text = f'{V32.opening("weather")}{PARAMETER_BEGIN}city" string="true">Ber'
    assert read([text], NO_SIGNS) == ("", [ToolCall("", "weather", '{"city": "Ber')])
    assert read([V32.opening("weather")], NO_SIGNS) == ("", [ToolCall("", "weather", "{}")])


def test_only_the_first_call_counts_unless_calls_may_be_parallel() -> None:
    text = V32.calls([ToolCall("", "clock", "{}"), ToolCall("", "clock", '{"a": 1}')])
    assert read([text], NO_SIGNS, parallel=False) == ("", [ToolCall("", "clock", "{}")])


WRITTEN = st.lists(
    st.sampled_from(
        [
            *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, PARAMETER_BEGIN, PARAMETER_END, DSML, "<", "</", "\n", " "),
            *('weather">', 'city" string="true">', 'days" string="false">', 'x">', "3", '"', "invoke", "x y", "｜DS"),
        ]
    ),
    max_size=16,
)
TAGS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, PARAMETER_BEGIN, PARAMETER_END, ' string="true', ' string="false')
SYNTAX = re.compile("|".join([*map(re.escape, TAGS), r"[\s{}:,>\"\\]"]))


def without_syntax(text: str) -> str:
    # In JSON's strings quotes and line breaks are escaped.
    text = text.replace("\\n", "").replace('\\"', '"')
    while (shorter := SYNTAX.sub("", text)) != text:
        text = shorter
    return text


@SIGNS
@given(written=WRITTEN, places=st.sets(st.integers(0, 199)), forced=st.booleans())
def test_nothing_that_a_model_wrote_is_lost(signs: Signs, written: list[str], places: set[int], forced: bool) -> None:
    text = signs.signed("".join(written))
    reader = V32.reader(signs, True, lambda: "id", TOOLS)
    if forced:
        reader.begin(signs.signed(V32.opening("weather")))
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    pushed = [reader.push(text[a:b]) for a, b in pairwise(edges)]
    parts = [part for parsed in [*pushed, reader.finish()] for part in parsed.parts]
    back = "".join(part if isinstance(part, str) else (part.name or "") + part.arguments for part in parts)
    assert without_syntax(signs.spelled(back)) == without_syntax(signs.spelled(text))


@SIGNS
@given(written=WRITTEN)
def test_the_result_does_not_depend_on_the_pieces(signs: Signs, written: list[str]) -> None:
    text = signs.signed("".join(written))
    assert read([text], signs) == read(list(text), signs)


def grammar_of(toolbox: Toolbox, token: bool) -> ToolGrammar:
    return ToolGrammar(toolbox, V32, lambda text: TOKEN if token else None)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_grammar_tokenizer(read_tokenizer(tokenizer_directory()), VOCABULARY, frozenset([1]))


def allows(grammar: str, text: str, token: bool, vocabulary: LLTokenizer) -> bool:
    """Whether this is a whole answer, whose markers are tokens or letters."""
    matcher = compile_grammar(vocabulary, grammar)
    token_ids = list[int]()
    for index, part in enumerate(text.split(DSML) if token else [text]):
        token_ids += [*([TOKEN] if index else []), *vocabulary.tokenize_str(part)]
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


TOKEN_OR_LETTERS = pytest.mark.parametrize("token", [True, False], ids=["token", "letters"])


@TOKEN_OR_LETTERS
@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (ARGUMENTS, True),
        ({"city": "Oslo"}, True),
        ({"city": "", "note": "<｜x"}, True),
        ({"days": 3}, False),
        ({"city": 3}, False),
        ({"city": "Oslo", "days": "3"}, False),
        ({"city": "Oslo", "unit": "K"}, False),
        ({"city": "Oslo", "at": {"y": 1}}, False),
        ({"city": "Oslo", "note": 1}, False),
        ({"city": "Oslo", "more": 1}, False),
    ],
)
def test_forced_calls_match_their_schema(
    arguments: dict[str, Any], right: bool, token: bool, vocabulary: LLTokenizer
) -> None:
    toolbox = Toolbox([Tool("weather", "", SCHEMA)], named="weather")
    grammar = grammar_of(toolbox, token)
    call = V32.calls([ToolCall("", "weather", json.dumps(arguments))]).removeprefix(V32.opening("weather"))
    assert allows(f"start: {grammar.begun()}\n{grammar.rules()}", call, token, vocabulary) == right


@TOKEN_OR_LETTERS
def test_a_required_call_may_be_of_any_tool_and_several(token: bool, vocabulary: LLTokenizer) -> None:
    toolbox = Toolbox([Tool("weather", "", SCHEMA, strict=True), Tool("clock", "", {})], required=True)
    grammar = grammar_of(toolbox, token)
    calls = [ToolCall("", "clock", "{}"), ToolCall("", "weather", '{"city": "Oslo"}')]
    begun = f"start: {grammar.begun()}\n{grammar.rules()}"
    for count in (1, 2):
        call = V32.calls(calls[:count]).removeprefix(V32.opening(None))
        assert allows(begun, call, token, vocabulary)
    assert not allows(begun, V32.calls([ToolCall("", "rain", "{}")]).removeprefix(V32.opening(None)), token, vocabulary)
    check_grammar(f"start: {grammar.whole()}\n{grammar.rules()}")
    assert allows(f"start: {grammar.whole()}\n{grammar.rules()}", V32.calls(calls), token, vocabulary)
    # After the token that shows that a call begins.
    _, _, rest = V32.calls(calls).partition(DSML)
    assert allows(f"start: {grammar.unbegun()}\n{grammar.rules()}", rest, token, vocabulary)


def test_arguments_beyond_the_schema_are_of_any_kind(vocabulary: LLTokenizer) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    grammar = grammar_of(Toolbox([Tool("t", "", schema)], named="t"), True)
    for arguments in ({"a": 1, "b": "x", "c": [1]}, {"b": "x"}, {}):
        call = V32.calls([ToolCall("", "t", json.dumps(arguments))]).removeprefix(V32.opening("t"))
        assert allows(f"start: {grammar.begun()}\n{grammar.rules()}", call, True, vocabulary)


def test_strict_limits_of_text_are_refused_by_name() -> None:
    schema = {"properties": {"city": {"type": "string", "pattern": "^O"}}}
    for strict in (False, True):
        grammar = grammar_of(Toolbox([Tool("t", "", schema, strict)], named="t"), True)
        with pytest.raises(InvalidConstraint, match="pattern of 'city'") if strict else nullcontext():
            grammar.rules()


@pytest.mark.parametrize(
    ("template", "vocabulary", "format"),
    [
        (f"{{{{ '<{DSML}function_calls>' }}}}", (), V32),
        ("{{ messages }}", (DSML,), V32),
        ("<｜tool▁calls▁begin｜>", (DSML,), V31),
    ],
)
def test_template_or_vocabulary_tells_the_format(
    template: str, vocabulary: tuple[str, ...], format: ToolFormat
) -> None:
    assert format_of(template, lambda text: 1 if text in vocabulary else None) is format
