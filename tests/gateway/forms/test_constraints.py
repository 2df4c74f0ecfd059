"""What answers of a form are allowed to be, as a worker would follow them."""

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from gateway.catalog import ModelText
from gateway.forms.answer_forms import (
    ANY_OBJECT,
    MAX_LARK_CHARACTERS,
    AnswerForm,
    ChoiceForm,
    GrammarForm,
    JsonForm,
    RegexForm,
)
from gateway.forms.constraints import UNSHAPED, AnswerShape, check_room, constraint_for, judged
from gateway.prompts.tokenizer import Tokenizer
from gateway.requests import FieldNames
from gateway.text.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningStart
from gateway.tool_formats.deepseek import V3, V31
from gateway.tool_formats.deepseek_reader import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from gateway.tool_formats.interface import ToolFormat, ToolReading
from gateway.tools import Tool, Toolbox
from mesh.domain.constraints import Constraint
from mesh.errors import InvalidConstraint
from mesh.text.grammars import check_grammar, compile_grammar, load_grammar_tokenizer
from mesh.text.tokenizer_file import read_tokenizer
from tests.support.fake_decode import VOCABULARY
from tests.support.gateways import MODEL, model_texts
from tests.support.tokenizers import tokenizer_directory

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", "", SCHEMA)
CLOCK = Tool("clock", "", {})
PARIS = '{"city": "Paris"}'


@pytest.fixture(scope="module")
def text() -> ModelText:
    return model_texts()[MODEL]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_grammar_tokenizer(read_tokenizer(tokenizer_directory()), VOCABULARY, frozenset([1]))


def tokenizer_of(text: ModelText) -> Tokenizer:
    assert text.tokenizer is not None
    return text.tokenizer


def allows(constraint: Constraint | None, answer: str, text: ModelText, vocabulary: LLTokenizer) -> bool:
    """Whether this is a whole answer."""
    assert constraint is not None and constraint.grammar is not None
    check_grammar(constraint.grammar)
    matcher = compile_grammar(vocabulary, constraint.grammar)
    token_ids = tokenizer_of(text).encode(answer)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


FORMS: dict[str, tuple[AnswerForm, list[str], list[str]]] = {
    "schema": (JsonForm(SCHEMA, ""), [PARIS, '{\n  "city": "Rome"\n}'], ['{"city": "Oslo"}', "{}", f"{PARIS} "]),
    "object": (JsonForm(ANY_OBJECT, ""), ["{}", '{"a": [1, null]}'], ["[]", "1", "{"]),
    "expression": (RegexForm(r"\d{2}/[a-z]+", ""), ["12/é".replace("é", "e")], ["1/a", "12/", "12/aB"]),
    "choices": (ChoiceForm(('say "no"', "yes\n"), ""), ['say "no"', "yes\n"], ["yes", "say no"]),
    "lark": (GrammarForm('start: "a" start | "b"', ""), ["b", "aab"], ["a", "ba"]),
    "gbnf": (GrammarForm('root ::= "a" root | "b"', "").in_lark(), ["b", "aab"], ["a", "ba"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_allows_its_answers_alone(name: str, text: ModelText, vocabulary: LLTokenizer) -> None:
    form, right, wrong = FORMS[name]
    constraint = constraint_for(form, AnswerShape(), text.tokenizer)
    assert constraint is not None and constraint.free_until is None
    assert all(allows(constraint, answer, text, vocabulary) for answer in right)
    assert not any(allows(constraint, answer, text, vocabulary) for answer in wrong)


@pytest.mark.parametrize("written", ["a</think>b", "</think>", "<｜end▁of▁sentence｜>"])
def test_the_text_of_a_control_token_is_spelled_by_others(
    written: str, text: ModelText, vocabulary: LLTokenizer
) -> None:
    constraint = constraint_for(ChoiceForm((written,), ""), AnswerShape(), text.tokenizer)
    assert constraint is not None and constraint.grammar is not None
    matcher, tokenizer = compile_grammar(vocabulary, constraint.grammar), tokenizer_of(text)
    token_ids = matcher.compute_ff_tokens()
    # A control token's are other bytes.
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == written.encode()
    assert not {tokenizer.control_id(THINK_CLOSE), 1} & set(token_ids)
    assert matcher.consume_tokens(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("grammar", ["start: start", r"start: /[^\s\S]/", 'start: %json {"$ref": "#"}'])
def test_a_grammar_that_nothing_matches_is_refused(grammar: str, vocabulary: LLTokenizer) -> None:
    with pytest.raises(InvalidConstraint, match="no text matches it"):
        compile_grammar(vocabulary, grammar)


def test_reasoning_is_free_up_to_its_end(text: ModelText, vocabulary: LLTokenizer) -> None:
    tokenizer = tokenizer_of(text)
    constraint = constraint_for(ChoiceForm(("yes",), ""), AnswerShape(ReasoningStart.OPEN), tokenizer)
    assert constraint is not None
    assert (constraint.free_until, constraint.opened_by) == (tokenizer.control_id(THINK_CLOSE), None)
    assert not constraint.may_end_free
    assert all(allows(constraint, answer, text, vocabulary) for answer in ("yes", "\n\nyes"))
    assert not allows(constraint, "\n\n\nyes", text, vocabulary)


def test_the_first_token_tells_whether_reasoning_begins(text: ModelText) -> None:
    tokenizer = tokenizer_of(text)
    constraint = constraint_for(ChoiceForm(("yes",), ""), AnswerShape(ReasoningStart.POSSIBLE), tokenizer)
    assert constraint is not None
    assert constraint.opened_by == tokenizer.control_id(THINK_OPEN)
    assert constraint.free_until == tokenizer.control_id(THINK_CLOSE)


def test_without_reasoning_the_form_holds_at_once(text: ModelText) -> None:
    shape = AnswerShape(ReasoningStart.POSSIBLE, wants_reasoning=False)
    constraint = constraint_for(ChoiceForm(("yes",), ""), shape, text.tokenizer)
    assert constraint is not None
    assert constraint.free_until is None and constraint.opened_by is None


def shape(toolbox: Toolbox, form: ToolFormat, begun: bool) -> AnswerShape:
    head = form.opening(toolbox.forced_name) if begun else ""
    return AnswerShape(ReasoningStart.NONE, True, toolbox, ToolReading(form, toolbox.parallel, head))


def call(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


def test_a_required_call_has_a_name_and_arguments_that_exist(text: ModelText, vocabulary: LLTokenizer) -> None:
    constraint = constraint_for(None, shape(Toolbox([WEATHER, CLOCK], required=True), V31, begun=True), text.tokenizer)
    first = f"weather{SEPARATOR}{PARIS}{CALL_END}"
    assert allows(constraint, f"{first}{CALLS_END}", text, vocabulary)
    assert allows(constraint, f"{first}\n{call('clock', '{}')}{CALLS_END}", text, vocabulary)
    assert not allows(constraint, f"rain{SEPARATOR}{PARIS}{CALL_END}{CALLS_END}", text, vocabulary)
    assert not allows(constraint, f"weather{SEPARATOR}{{}}{CALL_END}{CALLS_END}", text, vocabulary)


@pytest.mark.parametrize("form", (V3, V31))
def test_a_named_tool_is_called_once(form: ToolFormat, text: ModelText, vocabulary: LLTokenizer) -> None:
    toolbox = Toolbox([WEATHER, CLOCK], named="weather")
    constraint = constraint_for(None, shape(toolbox, form, begun=True), text.tokenizer)
    close = "\n```" if form is V3 else ""
    assert allows(constraint, f"{PARIS}{close}{CALL_END}{CALLS_END}", text, vocabulary)
    again = call("weather", PARIS) if form is V31 else CALL_BEGIN
    assert not allows(constraint, f"{PARIS}{close}{CALL_END}{again}{CALLS_END}", text, vocabulary)


def test_a_tool_gets_only_its_schemas_arguments(text: ModelText, vocabulary: LLTokenizer) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    tools = [Tool("a", "", {"properties": {"a": {"anyOf": [inner, {"type": "null"}]}}}), Tool("none", "", {})]
    for name, right, wrong in (
        ("a", ['{"a": {"b": 1}}', "{}"], ['{"x": 1}', '{"a": {"c": 1}}']),
        ("none", ["{}"], ['{"x": 1}']),
    ):
        constraint = constraint_for(None, shape(Toolbox(tools, named=name), V31, begun=True), text.tokenizer)
        assert all(allows(constraint, f"{each}{CALL_END}{CALLS_END}", text, vocabulary) for each in right)
        assert not any(allows(constraint, f"{each}{CALL_END}{CALLS_END}", text, vocabulary) for each in wrong)


def test_an_answer_of_a_form_may_call_tools_instead(text: ModelText, vocabulary: LLTokenizer) -> None:
    toolbox = Toolbox([WEATHER])
    constraint = constraint_for(ChoiceForm(("yes",), ""), shape(toolbox, V31, begun=False), text.tokenizer)
    assert allows(constraint, "yes", text, vocabulary)
    assert allows(constraint, f"{CALLS_BEGIN}{call('weather', PARIS)}{CALLS_END}", text, vocabulary)
    assert not allows(constraint, f"yes{CALLS_BEGIN}{call('weather', PARIS)}{CALLS_END}", text, vocabulary)


def test_tools_that_are_not_strict_leave_an_answer_free(text: ModelText) -> None:
    assert constraint_for(None, shape(Toolbox([WEATHER]), V31, begun=False), text.tokenizer) is None


def test_a_lax_schema_loses_what_cannot_be_enforced(text: ModelText, vocabulary: LLTokenizer) -> None:
    schema = {**SCHEMA, "not": {"type": "string"}}
    lenient = constraint_for(JsonForm(schema, "", lenient=True), AnswerShape(), text.tokenizer)
    strict = constraint_for(JsonForm(schema, ""), AnswerShape(), text.tokenizer)
    assert lenient is not None and strict is not None and strict.grammar is not None
    assert allows(lenient, PARIS, text, vocabulary)
    with pytest.raises(InvalidConstraint, match="not"):
        check_grammar(strict.grammar)


@pytest.mark.parametrize("form", [RegexForm("", "f"), ChoiceForm((), "f"), ChoiceForm(("a", ""), "f")])
def test_a_form_without_answers_is_refused_by_its_field(form: AnswerForm, text: ModelText) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        constraint_for(form, AnswerShape(), text.tokenizer)
    assert caught.value.metadata["field"] == "f"


def test_choices_that_do_not_fit_are_refused(text: ModelText) -> None:
    form = ChoiceForm(("abcd", "abcdefgh"), "f")
    assert judged('start: "a"', form, UNSHAPED, text.tokenizer) == 4
    check_room(4, 4, FieldNames())
    with pytest.raises(InvalidConstraint, match="4 tokens") as caught:
        check_room(4, 3, FieldNames(max_tokens="max_output_tokens"))
    assert caught.value.metadata["field"] == "max_output_tokens"


def test_a_written_grammar_has_a_bounded_length() -> None:
    beginning = 'start: "a"'
    assert GrammarForm(beginning.ljust(MAX_LARK_CHARACTERS), "f").in_lark().field == "f"
    with pytest.raises(InvalidConstraint, match=f"the limit is {MAX_LARK_CHARACTERS}"):
        GrammarForm(beginning.ljust(MAX_LARK_CHARACTERS + 1), "f").in_lark()


@pytest.mark.parametrize(
    "header", ["", '%llguidance {"no_forcing": false}\n', "// a remark"], ids=["", "header", "remark"]
)
def test_text_without_choice_and_end_takes_no_time(header: str, vocabulary: LLTokenizer) -> None:
    text = f'start: A A "a"\nA: "a"+\n{header}'
    matcher = compile_grammar(vocabulary, GrammarForm(text, "f").in_lark().text)
    assert any(matcher.compute_bitmask())


def test_a_schema_that_takes_too_long_is_refused() -> None:
    wide: list[dict[str, Any]] = [
        {"anyOf": [{"properties": {f"a{n}": {}}}, {"properties": {f"b{n}": {}}}]} for n in range(24)
    ]
    with pytest.raises(InvalidConstraint, match="too large"):
        check_grammar("start: %json " + json.dumps({"allOf": wide}))
