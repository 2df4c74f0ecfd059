"""The calls of Kimi K2: written, read, and held to their schema."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.forms.tool_grammar import ToolGrammar
from gateway.prompts.chat import ChatTemplate
from gateway.prompts.jinja_template import JinjaTemplate
from gateway.prompts.turns import ChatMessage
from gateway.text.signs import NO_SIGNS, Signs
from gateway.tool_formats.choice import format_of
from gateway.tool_formats.deepseek import V3, V31
from gateway.tool_formats.interface import ToolFormat
from gateway.tool_formats.kimi import K2, MARKERS
from gateway.tools import Tool, Toolbox, ToolCall
from mesh.text.grammars import check_grammar
from tests.support.gateways import model_texts
from tests.support.rendered import our_text

CALLS = [ToolCall("", "get_weather", '{"city": "Oslo"}'), ToolCall("", "clock", "{}")]
TOKENS = Signs(K2.markers, {text: index for index, text in enumerate(sorted(K2.markers))}.__getitem__)
SIGNS = pytest.mark.parametrize("signs", [TOKENS, NO_SIGNS], ids=["tokens", "letters"])
SYNTAX = re.compile("|".join([*map(re.escape, K2.markers), r"functions\.", r":[0-9]", r"\s"]))


def read(text: str, signs: Signs) -> list[str | tuple[str | None, str | None, str]]:
    reader = K2.reader(signs, True, lambda: "new", {})
    parts = [part for parsed in [*map(reader.push, text), reader.finish()] for part in parsed.parts]
    return [signs.spelled(part) if isinstance(part, str) else (part.id, part.name, part.arguments) for part in parts]


@SIGNS
def test_a_call_has_the_id_that_the_model_gave_it(signs: Signs) -> None:
    written = "I look." + K2.calls(CALLS)
    assert "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>" in written
    parts = read(signs.signed(written), signs)
    assert "".join(part for part in parts if isinstance(part, str)) == "I look."
    named = [part[:2] for part in parts if not isinstance(part, str) and part[1] is not None]
    assert named == [("functions.get_weather:0", "get_weather"), ("functions.clock:1", "clock")]


def test_an_id_that_the_model_used_before_is_replaced() -> None:
    parts = read(K2.calls(CALLS[1:]) + K2.calls(CALLS[1:]), NO_SIGNS)
    assert [part[0] for part in parts if not isinstance(part, str) and part[1]] == ["functions.clock:0", "new"]


def test_a_forced_call_is_numbered_after_those_of_the_chat() -> None:
    tokenizer = model_texts()["oracle"].tokenizer
    assert tokenizer is not None
    # A template that shows calls as Kimi's does.
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_calls_section_begin|>{{ c.id }}"
        "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    chat = [ChatMessage("user", "q"), ChatMessage("assistant", "", CALLS), *[ChatMessage("tool", "r")] * 2]
    toolbox = Toolbox([Tool("clock", "", {})], named="clock")
    rendered = ChatTemplate(JinjaTemplate(source, tokenizer), tokenizer).render(chat, toolbox=toolbox)
    assert our_text(rendered).endswith("<|tool_call_begin|>functions.clock:2<|tool_call_argument_begin|>")
    assert rendered.tools is not None and rendered.tools.format is K2


@pytest.mark.parametrize(
    ("template", "vocabulary", "format"),
    [
        ("<|tool_calls_section_begin|>", (), K2),
        ("{{ messages }}", (MARKERS.begin,), K2),
        ("<｜tool▁calls▁begin｜>", (MARKERS.begin,), V31),
        ("<｜tool▁calls▁begin｜>```json", (), V3),
        ("{{ messages }}", (), V31),
    ],
)
def test_template_or_vocabulary_tells_the_format(
    template: str, vocabulary: tuple[str, ...], format: ToolFormat
) -> None:
    assert format_of(template, lambda text: 1 if text in vocabulary else None) is format


@pytest.mark.parametrize("named", [None, "clock"])
def test_the_grammar_of_calls_can_be_compiled(named: str | None) -> None:
    toolbox = Toolbox([Tool("get_weather", "", {}), Tool("clock", "", {})], required=True, named=named)
    grammar = ToolGrammar(toolbox, K2, lambda text: 5 if text in K2.markers else None)
    check_grammar(f"start: {grammar.begun()}\n{grammar.rules()}")
    check_grammar(f"start: {grammar.unbegun()}\n{grammar.rules()}")


WRITTEN = st.lists(
    st.sampled_from([*MARKERS, "functions.", "a", ":1", " ", '{"b": "', '"}', "<|tool_", "x y"]), max_size=12
)


@SIGNS
@given(written=WRITTEN)
def test_nothing_that_a_model_wrote_is_lost(signs: Signs, written: list[str]) -> None:
    text = signs.signed("".join(written))
    parts = read(text, signs)
    back = "".join(part if isinstance(part, str) else (part[1] or "") + signs.spelled(part[2]) for part in parts)
    assert without_syntax(back) == without_syntax(signs.spelled(text))


def without_syntax(text: str) -> str:
    while (shorter := SYNTAX.sub("", text)) != text:
        text = shorter
    return text
