from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tool_format import CALL_BEGIN, CALL_END, CALLS_BEGIN, CallForm, opening, written_calls
from gateway.tool_parser import ToolCallParser
from gateway.tools import ToolCall

CALLS = [ToolCall("", "weather", '{"city": "Bergen", "note": "a<｜b"}'), ToolCall("", "time", "{}")]
FORMS = pytest.mark.parametrize("form", list(CallForm))


def read(parser: ToolCallParser, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    content, names, arguments = "", list[str](), list[str]()
    for parsed in [*map(parser.push, pieces), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.id is not None
                assert delta.index == len(names)
                names.append(delta.name)
                arguments.append("")
            arguments[delta.index] += delta.arguments
    return content, [ToolCall("", *pair) for pair in zip(names, arguments, strict=True)]


def cut(text: str, places: set[int]) -> list[str]:
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@FORMS
@given(places=st.sets(st.integers(0, 300)))
def test_calls_are_found_however_the_text_is_split(form: CallForm, places: set[int]) -> None:
    text = "Let me see <｜tool▁c. " + written_calls(CALLS, form) + "ignored"
    assert read(ToolCallParser(form), cut(text, places)) == ("Let me see <｜tool▁c. ", CALLS)


def test_arguments_stream_before_the_call_has_ended() -> None:
    parser = ToolCallParser(CallForm.PLAIN)
    parser.push(opening(CallForm.PLAIN, "weather"))
    (delta,) = parser.push('{"city": "Ber<').calls
    assert delta.arguments == '{"city": "Ber'


def test_text_without_calls_stays_as_it_is() -> None:
    assert read(ToolCallParser(CallForm.PLAIN), ["a <", "｜b", "<｜tool▁calls▁begin"]) == (
        "a <｜b<｜tool▁calls▁begin",
        [],
    )


@FORMS
def test_only_the_first_call_counts_unless_calls_may_be_parallel(form: CallForm) -> None:
    assert read(ToolCallParser(form, parallel=False), [written_calls(CALLS, form)]) == ("", CALLS[:1])


@FORMS
def test_an_answer_that_was_cut_off_keeps_the_arguments_so_far(form: CallForm) -> None:
    text = opening(form, "weather") + '{"city": "Ber\n'
    assert read(ToolCallParser(form), [text]) == ("", [ToolCall("", "weather", '{"city": "Ber\n')])


def test_calls_without_the_outer_markers_are_found_too() -> None:
    text = written_calls(CALLS, CallForm.PLAIN).removeprefix(CALLS_BEGIN)
    assert text.startswith(CALL_BEGIN)
    assert CALL_END in text
    assert read(ToolCallParser(CallForm.PLAIN), [text]) == ("", CALLS)
