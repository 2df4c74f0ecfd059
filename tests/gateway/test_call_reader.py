"""Calls in answers, as tokens or as letters: found however the answer is split, and nothing else is lost."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.signs import NO_SIGNS, Signs
from gateway.tool_formats.deepseek import V3, V31
from gateway.tool_formats.deepseek_reader import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from gateway.tool_formats.interface import CallReader, ToolFormat
from gateway.tools import ToolCall

CALLS = [ToolCall("", "weather", '{"city": "Bergen", "note": "a<｜b"}'), ToolCall("", "time", "{}")]
FORMATS = pytest.mark.parametrize("form", [V3, V31])
# Every marker as a token, and as letters.
TOKENS = Signs(V31.markers, {text: index for index, text in enumerate(sorted(V31.markers))}.get)
SIGNS = pytest.mark.parametrize("signs", [TOKENS, NO_SIGNS], ids=["tokens", "letters"])
SYNTAX = re.compile("|".join([*map(re.escape, V31.markers), "json", "`", "function", r"\s"]))


def reader(form: ToolFormat = V31, signs: Signs = NO_SIGNS, parallel: bool = True) -> CallReader:
    ids = iter(range(99))
    return form.reader(signs, parallel, lambda: str(next(ids)), {})


def read(reader: CallReader, pieces: Sequence[str], signs: Signs = NO_SIGNS) -> tuple[str, list[ToolCall]]:
    """Content and calls of an answer whose pieces are signed text."""
    content, names, arguments = "", list[str](), list[str]()
    for parsed in [*map(reader.push, pieces), reader.finish()]:
        content += signs.spelled(parsed.content)
        for delta in parsed.calls:
            if delta.name is not None:
                assert (delta.id, delta.index) == (str(len(names)), len(names))
                names.append(delta.name)
                arguments.append("")
            arguments[delta.index] += signs.spelled(delta.arguments)
    return content, [ToolCall("", *pair) for pair in zip(names, arguments, strict=True)]


def cut(text: str, places: set[int]) -> list[str]:
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@FORMATS
@SIGNS
@given(places=st.sets(st.integers(0, 300)))
def test_calls_are_found_however_the_text_is_split(form: ToolFormat, signs: Signs, places: set[int]) -> None:
    text = signs.signed("Let me see <｜tool▁c. " + form.calls(CALLS) + "\nDone.")
    assert read(reader(form, signs), cut(text, places), signs) == ("Let me see <｜tool▁c. \nDone.", CALLS)


def test_arguments_stream_before_the_call_has_ended() -> None:
    stream = reader()
    stream.push(V31.opening("weather"))
    (delta,) = stream.push('{"city": "Ber<').calls
    assert delta.arguments == '{"city": "Ber'


@SIGNS
@pytest.mark.parametrize(
    "text",
    [
        "a <｜b<｜tool▁calls▁begin",
        f"see {CALLS_BEGIN} there",
        f"see {CALLS_BEGIN}",
        f"{CALLS_BEGIN}{CALLS_BEGIN}x",
        f"{CALL_BEGIN}no separator{CALL_END} after",
        f"{CALLS_BEGIN}{CALL_BEGIN}two words{SEPARATOR}{{}}{CALL_END}",
        f"{CALL_BEGIN}function{SEPARATOR}weather, I think{CALL_END}",
        f"{CALL_END}{CALLS_END}{SEPARATOR} alone",
        CALL_BEGIN + "x" * 2000,
    ],
)
def test_text_that_is_no_call_is_content(signs: Signs, text: str) -> None:
    assert read(reader(signs=signs), list(signs.signed(text)), signs) == (text, [])


@FORMATS
def test_only_the_first_call_counts_unless_calls_may_be_parallel(form: ToolFormat) -> None:
    assert read(reader(form, parallel=False), [form.calls(CALLS)]) == ("", CALLS[:1])


@FORMATS
def test_a_cut_answer_keeps_the_arguments_so_far(form: ToolFormat) -> None:
    text = form.opening("weather") + '{"city": "Ber\n'
    assert read(reader(form), [text]) == ("", [ToolCall("", "weather", '{"city": "Ber\n')])


def test_calls_without_the_outer_markers_are_found_too() -> None:
    text = V31.calls(CALLS).removeprefix(CALLS_BEGIN).removesuffix(CALLS_END)
    assert read(reader(), [text]) == ("", CALLS)


@SIGNS
@pytest.mark.parametrize("form", [V3, V31])
def test_letters_of_a_marker_inside_an_argument_are_letters(form: ToolFormat, signs: Signs) -> None:
    arguments = f'{{"text": "write {CALL_END}\\" and {CALLS_END} at the end"}}'
    head, tail = (signs.signed("".join(pieces)) for pieces in ((form.opening("say"),), form.tail))
    assert read(reader(form, signs), list(head + arguments + tail), signs) == ("", [ToolCall("", "say", arguments)])


@SIGNS
def test_a_malformed_call_does_not_swallow_the_next(signs: Signs) -> None:
    text = f'{CALLS_BEGIN}{CALL_BEGIN}weather{SEPARATOR}{{"city": 1{CALL_BEGIN}time{SEPARATOR}{{}}{CALL_END}{CALLS_END}'
    calls = [ToolCall("", "weather", '{"city": 1'), ToolCall("", "time", "{}")]
    assert read(reader(signs=signs), list(signs.signed(text)), signs) == ("", calls)


@SIGNS
@pytest.mark.parametrize(
    "written",
    [
        "function{sep}weather\n```json\n{{}}\n```",
        "function{sep}weather\n```\n{{}}\n```",
        "function{sep}weather\n```json\n{{}}```\n",
        "function{sep}weather```json\n{{}}\n```",
        "function{sep}weather\n{{}}",
        "weather{sep}{{}}",
    ],
)
def test_both_forms_are_understood_with_their_slips(signs: Signs, written: str) -> None:
    text = CALLS_BEGIN + CALL_BEGIN + written.format(sep=SEPARATOR) + CALL_END + CALLS_END
    content, (call,) = read(reader(signs=signs), list(signs.signed(text)), signs)
    assert (content, call.name, call.arguments.strip()) == ("", "weather", "{}")


def test_a_tool_may_be_called_function() -> None:
    call = ToolCall("", "function", '{"a": 1}')
    assert read(reader(), list(V31.calls([call]))) == ("", [call])


def test_the_prompts_beginning_of_a_call_never_becomes_content() -> None:
    stream = reader(V3)
    assert stream.begin(V3.opening(None)).parts == []
    assert read(stream, ["I would rather ", "not."]) == ("I would rather not.", [])


WRITTEN = st.lists(
    st.sampled_from(
        [
            *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, "function", "weather", "\n", " "),
            *("```json\n", "```", "`", '{"a": "', '"}', "{}", "\\", "x", "<｜tool▁", "call▁end｜>", "<"),
        ]
    ),
    max_size=16,
)


def without_syntax(text: str) -> str:
    """Parts that were apart may make another marker once what stood between them is gone."""
    while (shorter := SYNTAX.sub("", text)) != text:
        text = shorter
    return text


@SIGNS
@given(written=WRITTEN, places=st.sets(st.integers(0, 99)), forced=st.booleans())
def test_nothing_that_a_model_wrote_is_lost(signs: Signs, written: list[str], places: set[int], forced: bool) -> None:
    """What is neither a marker nor a code block's fence comes back, in order."""
    text = signs.signed("".join(written))
    stream = reader(signs=signs)
    if forced:
        stream.begin(signs.signed(V31.opening("weather")))
    parts = [part for parsed in [*map(stream.push, cut(text, places)), stream.finish()] for part in parsed.parts]
    back = "".join(part if isinstance(part, str) else (part.name or "") + part.arguments for part in parts)
    assert without_syntax(signs.spelled(back)) == without_syntax(signs.spelled(text))


@SIGNS
@given(written=WRITTEN, places=st.sets(st.integers(0, 99)))
def test_the_result_does_not_depend_on_the_pieces(signs: Signs, written: list[str], places: set[int]) -> None:
    text = signs.signed("".join(written))
    assert read(reader(signs=signs), cut(text, places), signs) == read(reader(signs=signs), list(text), signs)
