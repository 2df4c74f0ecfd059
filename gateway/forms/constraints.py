"""Turns the form that a client asks an answer to have into the constraint that a worker enforces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from gateway.forms.answer_forms import AnswerForm, ChoiceForm, GrammarForm, JsonForm
from gateway.forms.shortest_json import shortest_json
from gateway.forms.tool_grammar import ToolGrammar, arguments_schema, wrong_tool
from gateway.prompts.tokenizer import Tokenizer
from gateway.requests import FieldNames
from gateway.text.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningStart
from gateway.tool_formats.interface import ToolReading
from gateway.tools import Tool, Toolbox
from mesh.domain.constraints import Constraint
from mesh.errors import InvalidConstraint, InvalidRequest
from mesh.text.grammars import check_grammar

TOOLS_FIELD = "tools"
MAX_BAD_WORDS = 64
MAX_WORD_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The properties of a prompt that decide how its answer is read and what it may be."""

    reasoning: ReasoningStart = ReasoningStart.NONE
    # Whether the answer is to begin with reasoning. If not, a form holds from the first token on.
    wants_reasoning: bool = True
    toolbox: Toolbox | None = None
    # None if the answer calls no tools.
    calls: ToolReading | None = None
    # The control token that ends reasoning, if the prompt ends with it.
    closed_by: int | None = None

    def under(self, constraint: Constraint | None) -> "AnswerShape":
        """The shape of an answer that this constraint holds to. If its grammar begins with the first token, all text is
        the answer's: tags in it are what the client asked for.
        """
        if constraint is None or constraint.grammar is None or constraint.free_until is not None:
            return self
        return replace(self, reasoning=ReasoningStart.NONE, closed_by=None)

    def lenient_tools(self, form: AnswerForm | None) -> Sequence[Tool]:
        """Tools whose schemas a grammar has, without the client being strict about them."""
        if self.toolbox is None or self.calls is None:
            return ()
        in_grammar = self.calls.opening or form is not None or any(tool.strict for tool in self.toolbox.tools)
        return [tool for tool in self.toolbox.tools if not tool.strict] if in_grammar else ()


UNSHAPED = AnswerShape()


def constraint_for(form: AnswerForm | None, shape: AnswerShape, tokenizer: Tokenizer | None) -> Constraint | None:
    """None if the answer may be anything. `form`, if it is a grammar, must be in Lark. Raises InvalidConstraint naming
    the field.
    """
    try:
        reasoning = shape.reasoning if shape.wants_reasoning else ReasoningStart.NONE
        if shape.toolbox is not None and shape.calls is not None:
            tools = ToolGrammar(shape.toolbox, shape.calls.format, _control(tokenizer))
            if shape.calls.opening:
                return Constraint(f"start: {tools.begun()}\n{tools.rules()}")
            if form is None:
                return _strict_calls(shape.toolbox, tools)
            return _answer(form, reasoning, tokenizer, tools)
        return None if form is None else _answer(form, reasoning, tokenizer, None)
    except InvalidConstraint as error:
        raise InvalidConstraint(error.message, field=TOOLS_FIELD if form is None else form.field) from error


def judged(grammar: str, form: AnswerForm | None, shape: AnswerShape, tokenizer: Tokenizer | None) -> int:
    """Checks a grammar that `constraint_for` made. Returns a lower bound of the tokens in an answer; 0 if none is
    known.

    May take a second. Raises InvalidConstraint if the grammar is invalid, naming the tool whose arguments cause it.
    """
    try:
        check_grammar(grammar)
    except InvalidConstraint as error:
        tool = None if shape.toolbox is None else wrong_tool(shape.toolbox)
        raise InvalidConstraint(error.message, field=None if tool is None else tool.schema_field) from error
    return 0 if tokenizer is None else _least_tokens(form, shape, tokenizer)


def _least_tokens(form: AnswerForm | None, shape: AnswerShape, tokenizer: Tokenizer) -> int:
    def tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    least: list[int] = []
    if form is not None:
        least.append(_least_of_form(form, tokens))
    if shape.toolbox is not None and shape.calls is not None and shape.calls.format.json_arguments:
        # A call also has a name and markers, so this is a lower bound. If the answer need not call a tool, the model
        # may write text instead: 0.
        tools = [tool for tool in shape.toolbox.tools if shape.toolbox.forced_name in (None, tool.name)]
        least += [shortest_json(arguments_schema(tool), tokens) if shape.calls.opening else 0 for tool in tools]
    return min(least, default=0)


def _least_of_form(form: AnswerForm, tokens: Callable[[str], int]) -> int:
    match form:
        case ChoiceForm():
            return min(map(tokens, form.texts))
        case JsonForm():
            return shortest_json(form.schema, tokens)
        case _:
            return 0


def check_room(least: int, max_tokens: int, names: FieldNames) -> None:
    """Raises InvalidConstraint if even the shortest answer has more than `max_tokens` tokens."""
    if least > max_tokens:
        raise InvalidConstraint(
            f"the shortest answer has {least} tokens, and {names.max_tokens} leaves {max_tokens}: allow more",
            field=names.max_tokens,
        )


def with_bans(
    constraint: Constraint | None,
    bad_words: Sequence[str],
    min_tokens: int,
    max_tokens: int,
    tokenizer: Tokenizer | None,
) -> Constraint | None:
    """`constraint` with banned words and a minimum length added; None if there is nothing to enforce.

    Raises InvalidRequest naming the field.
    """
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidRequest(f"min_tokens must be from 0 to max_tokens ({max_tokens})", field="min_tokens")
    if not bad_words and not min_tokens:
        return constraint
    if bad_words and tokenizer is None:
        raise InvalidRequest("a model without a tokenizer has no words: leave bad_words out", field="bad_words")
    if len(bad_words) > MAX_BAD_WORDS or not all(0 < len(word) <= MAX_WORD_CHARACTERS for word in bad_words):
        allowed = f"at most {MAX_BAD_WORDS} texts of 1 to {MAX_WORD_CHARACTERS} characters"
        raise InvalidRequest(f"bad_words must be {allowed}", field="bad_words")
    # Tokenizers spell a word differently at the beginning of a line and after a space.
    spelled = {tuple(tokenizer.encode(text)) for word in bad_words if tokenizer for text in (word, f" {word}")}
    return structs.replace(constraint or Constraint(), banned=sorted(spelled), min_tokens=min_tokens)


def _strict_calls(toolbox: Toolbox, tools: ToolGrammar) -> Constraint | None:
    """The model may write anything; once it begins a call, the call must be correct."""
    if not any(tool.strict for tool in toolbox.tools):
        return None
    begin = tools.control(tools.format.trigger)
    if begin is None:
        raise InvalidConstraint(
            "strict needs a model with control tokens for calls, or tool_choice required or by name: leave it out"
        )
    return Constraint(f"start: {tools.unbegun()}\n{tools.rules()}", free_until=begin, may_end_free=True)


def _answer(
    form: AnswerForm, reasoning: ReasoningStart, tokenizer: Tokenizer | None, tools: ToolGrammar | None
) -> Constraint:
    close = opening = None
    if reasoning is not ReasoningStart.NONE:
        control = _control(tokenizer)
        close, opening = control(THINK_CLOSE), control(THINK_OPEN)
        if close is None and reasoning is ReasoningStart.OPEN:
            raise InvalidConstraint("this model's reasoning does not end with a token of its own: turn thinking off")
    opened = reasoning is ReasoningStart.OPEN
    grammar = _grammar(form, opened, tools)
    if opened:
        return Constraint(grammar, free_until=close)
    if close is None or opening is None:
        return Constraint(grammar)
    return Constraint(grammar, free_until=close, opened_by=opening)


def _grammar(form: AnswerForm, opened: bool, tools: ToolGrammar | None) -> str:
    """opened: the answer follows reasoning, and perhaps line breaks that belong to neither."""
    if isinstance(form, GrammarForm):
        return form.text
    lines = [f"start: {'lead ' if opened else ''}{'answer' if tools is None else '(answer | calls)'}"]
    lines += [f"answer: {form.rule()}", *(["lead: /\\n{0,2}/"] if opened else [])]
    if tools is not None:
        lines += [f"calls: {tools.whole()}", tools.rules()]
    return "\n".join(lines)


def _control(tokenizer: Tokenizer | None) -> Callable[[str], int | None]:
    """A function from a control token's text to its id; it gives None for text that is no control token of the
    model.
    """
    return (lambda text: None) if tokenizer is None else tokenizer.control_id
