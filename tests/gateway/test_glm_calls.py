"""The calls of GLM's models: their arguments read as JSON, written, and held to their schema."""

import json
import re
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.forms.tool_grammar import ToolGrammar
from gateway.text.signs import NO_SIGNS, Signs
from gateway.tool_formats.choice import format_of
from gateway.tool_formats.deepseek import V31
from gateway.tool_formats.glm import COMPACT, LINES, Glm
from gateway.tool_formats.glm_reader import CALL_BEGIN, CALL_END, KEY_BEGIN, MARKERS, VALUE_BEGIN
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
        "any": {},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
TOOLS = {"weather": SCHEMA, "clock": {}}
ARGUMENTS = {"city": 'Os"lo\n5', "days": 3, "unit": "C", "at": {"x": 1.5}, "any": ["<b>"]}
TOKENS = Signs(MARKERS, MARKERS.index)
SIGNS = pytest.mark.parametrize("signs", [TOKENS, NO_SIGNS], ids=["tokens", "letters"])
FORMATS = pytest.mark.parametrize("form", [LINES, COMPACT], ids=["lines", "compact"])


def read(pieces: list[str], signs: Signs, opening: str = "", parallel: bool = True) -> tuple[str, list[ToolCall]]:
    """Content and calls."""
    return read_calls(LINES.reader(signs, parallel, lambda: "id", TOOLS), pieces, signs, opening)


@FORMATS
@SIGNS
@given(places=st.sets(st.integers(0, 400)))
def test_arguments_are_read_as_json_however_the_text_is_split(form: Glm, signs: Signs, places: set[int]) -> None:
    calls = [ToolCall("", "weather", json.dumps(ARGUMENTS)), ToolCall("", "clock", "{}")]
    text = signs.signed(f"I look.\n{form.calls(calls)}\nDone.")
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    content, (weather, clock) = read([text[a:b] for a, b in pairwise(edges)], signs)
    assert content == "I look.\n\nDone."
    assert (weather.name, json.loads(weather.arguments)) == ("weather", ARGUMENTS)
    assert (clock.name, clock.arguments) == ("clock", "{}")


def test_text_streams_before_its_end() -> None:
    reader = LINES.reader(TOKENS, True, lambda: "id", TOOLS)
    reader.push(TOKENS.signed("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>"))
    (delta,) = reader.push('Os"').calls
    assert delta.arguments == r"Os\""


@pytest.mark.parametrize(("written", "value"), [("5", 5), ('"5"', "5"), ("five", "five"), ("[1", "[1"), ("", "")])
def test_a_value_of_any_type_is_json_if_possible(written: str, value: Any) -> None:
    text = f"<tool_call>clock\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    assert json.loads(read([text], NO_SIGNS)[1][0].arguments) == {"a": value}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "five", "five"),
        ({"$ref": "#/$defs/name"}, "5", "5"),
        ({"type": "integer"}, "5.0", 5.0),
    ],
)
def test_a_value_has_a_type_of_its_schema(schema: dict[str, Any], written: str, value: Any) -> None:
    tools = {"t": {"properties": {"a": schema}, "$defs": {"name": {"type": "string"}}}}
    reader = COMPACT.reader(NO_SIGNS, True, lambda: "id", tools)
    text = f"<tool_call>t<arg_key>a</arg_key><arg_value>{written}</arg_value></tool_call>"
    arguments = "".join(delta.arguments for delta in reader.push(text).calls)
    assert json.loads(arguments) == {"a": value}


@SIGNS
@pytest.mark.parametrize(
    "text",
    [
        f"write {CALL_BEGIN} here",
        f"{CALL_BEGIN}two words{CALL_END}",
        f"{CALL_BEGIN}{CALL_BEGIN}",
        f"{CALL_END}{KEY_BEGIN}x{VALUE_BEGIN}",
        CALL_BEGIN + "x" * 2000,
    ],
)
def test_text_that_is_no_call_is_content(signs: Signs, text: str) -> None:
    assert read(list(signs.signed(text)), signs) == (text, [])


@FORMATS
def test_a_call_that_begins_in_the_prompt_goes_on(form: Glm) -> None:
    answer = form.calls([ToolCall("", "weather", '{"days": 3}')]).removeprefix(form.opening("weather"))
    assert read([answer], NO_SIGNS, form.opening("weather")) == ("", [ToolCall("", "weather", '{"days": 3}')])
    assert read(["clock</tool_call>"], NO_SIGNS, form.opening(None)) == ("", [ToolCall("", "clock", "{}")])
    assert read(["no, thanks"], NO_SIGNS, form.opening(None)) == ("no, thanks", [])


def test_only_the_first_call_counts_unless_calls_may_be_parallel() -> None:
    text = LINES.calls([ToolCall("", "clock", "{}"), ToolCall("", "clock", '{"a": 1}')])
    assert read([text], NO_SIGNS, parallel=False) == ("", [ToolCall("", "clock", "{}")])


WRITTEN = st.lists(
    st.sampled_from([*MARKERS, "weather", "city", "days", "3", " ", "\n", "<arg_", "key>", "x y"]), max_size=14
)
SYNTAX = re.compile("|".join([*map(re.escape, MARKERS), r"[\s{}:,\"\\]"]))


def without_syntax(text: str) -> str:
    while (shorter := SYNTAX.sub("", text.replace("\\n", ""))) != text:
        text = shorter
    return text


@SIGNS
@given(written=WRITTEN, places=st.sets(st.integers(0, 99)))
def test_nothing_that_a_model_wrote_is_lost(signs: Signs, written: list[str], places: set[int]) -> None:
    text = signs.signed("".join(written))
    reader = LINES.reader(signs, True, lambda: "id", TOOLS)
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    pushed = [reader.push(text[a:b]) for a, b in pairwise(edges)]
    parts = [part for parsed in [*pushed, reader.finish()] for part in parsed.parts]
    back = "".join(part if isinstance(part, str) else (part.name or "") + part.arguments for part in parts)
    assert without_syntax(signs.spelled(back)) == without_syntax(signs.spelled(text))
    assert read([text], signs) == read(list(text), signs)


@FORMATS
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("named", [None, "weather"])
def test_the_grammar_of_calls_can_be_compiled(form: Glm, tokens: bool, named: str | None) -> None:
    toolbox = Toolbox([Tool("weather", "", SCHEMA), Tool("clock", "", {})], required=True, named=named)
    grammar = ToolGrammar(toolbox, form, lambda text: MARKERS.index(text) + 5 if tokens else None)
    check_grammar(f"start: {grammar.begun()}\n{grammar.rules()}")
    check_grammar(f"start: {grammar.unbegun()}\n{grammar.rules()}")


@FORMATS
@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"city": "Oslo", "days": 3, "unit": "C", "at": {"x": 1.5}, "any": [1]}, True),
        ({"city": "Oslo"}, True),
        ({"days": 3}, False),
        ({"city": "Oslo", "unit": "K"}, False),
        ({"city": "Oslo", "at": {"y": 1}}, False),
        ({"city": "Oslo", "more": 1}, False),
    ],
)
def test_forced_calls_match_their_schema(form: Glm, arguments: dict[str, Any], right: bool) -> None:
    vocabulary = load_grammar_tokenizer(read_tokenizer(tokenizer_directory()), VOCABULARY, frozenset([1]))
    grammar = ToolGrammar(Toolbox([Tool("weather", "", SCHEMA)], named="weather"), form, lambda text: None)
    matcher = compile_grammar(vocabulary, f"start: {grammar.begun()}\n{grammar.rules()}")
    call = form.calls([ToolCall("", "weather", json.dumps(arguments))]).removeprefix(form.opening("weather"))
    token_ids = vocabulary.tokenize_str(call)
    assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) == right


def test_strict_limits_of_text_are_refused_by_name() -> None:
    schema = {"properties": {"city": {"type": "string", "pattern": "^O"}}}
    for strict in (False, True):
        grammar = ToolGrammar(Toolbox([Tool("t", "", schema, strict)], named="t"), COMPACT, lambda text: None)
        with pytest.raises(InvalidConstraint, match="pattern of 'city'") if strict else nullcontext():
            grammar.rules()


@pytest.mark.parametrize(
    ("template", "vocabulary", "format"),
    [
        ("<arg_key>{{ k }}</arg_key>\n<arg_value>", (), LINES),
        ("<arg_key>{{ k }}</arg_key><arg_value>", (), COMPACT),
        ("{{ messages }}", (KEY_BEGIN,), LINES),
        ("<｜tool▁calls▁begin｜>", (KEY_BEGIN,), V31),
    ],
)
def test_template_or_vocabulary_tells_the_format(
    template: str, vocabulary: tuple[str, ...], format: ToolFormat
) -> None:
    assert format_of(template, lambda text: 1 if text in vocabulary else None) is format
