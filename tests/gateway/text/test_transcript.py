import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningStart
from gateway.text.signs import NO_SIGNS, Signs
from gateway.text.stop_strings import StopMatch
from gateway.text.transcript import Transcript, no_text
from gateway.tool_formats.deepseek import V31
from gateway.tool_formats.deepseek_reader import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from gateway.tool_formats.dsml import V32
from gateway.tool_formats.dsml_reader import DSML
from gateway.tool_formats.interface import ToolFormat, ToolReading

TOKENS = [b"<think>", b"</think>", b"</th", b"ink>", b"\n", b"a", b"ST", b"OP", b"\xe4\xbd", b"\xa0"]
IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)
# Both tags are tokens.
TAGS = Signs((THINK_OPEN, THINK_CLOSE), {THINK_OPEN: 0, THINK_CLOSE: 1}.get)
SIGNS = pytest.mark.parametrize("signs", [TAGS, NO_SIGNS], ids=["tokens", "letters"])


def read(
    groups: list[list[int]], stops: list[str], start: ReasoningStart, signs: Signs
) -> tuple[str, str, int, int, object]:
    transcript = Transcript(TOKENS.__getitem__, stops, start, signs=signs)
    content = reasoning = ""
    tokens, match = 0, None
    for group in groups:
        passage = transcript.push(group)
        content, reasoning = content + passage.content, reasoning + passage.reasoning
        tokens, match = tokens + passage.tokens, passage.match
        if match is not None:
            return content, reasoning, tokens, transcript.reasoning_tokens, match
    passage = transcript.finish()
    return (content + passage.content, reasoning + passage.reasoning, tokens, transcript.reasoning_tokens, match)


@SIGNS
@given(
    token_ids=IDS,
    cuts=st.lists(st.integers(0, 12)),
    stops=st.sampled_from([[], ["STOP"], ["\n", "aS"], ["nk>a"], ["a</thi"]]),
    start=st.sampled_from(ReasoningStart),
)
def test_the_answer_does_not_depend_on_how_tokens_were_grouped(
    signs: Signs, token_ids: list[int], cuts: list[int], stops: list[str], start: ReasoningStart
) -> None:
    cuts = sorted(min(cut, len(token_ids)) for cut in cuts)
    groups = [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    assert read(groups, stops, start, signs) == read([[token_id] for token_id in token_ids], stops, start, signs)


def test_tokens_from_the_opening_to_the_closing_tag_are_reasoning() -> None:
    transcript = Transcript(TOKENS.__getitem__, [], ReasoningStart.POSSIBLE)
    transcript.push([0, 5, 5, 1, 5])
    assert transcript.reasoning_tokens == 4


def test_reasoning_ended_by_the_prompt_ends_once() -> None:
    def answer(*token_ids: int, stops: tuple[str, ...] = ()) -> str:
        transcript = Transcript(TOKENS.__getitem__, stops, ReasoningStart.POSSIBLE, closed_by=1)
        return transcript.push([5]).content + transcript.push(token_ids).content + transcript.finish().content

    assert answer(5, 1, 5) == "aa\n\na"
    # Spelled out, it is text.
    assert answer(2, 3, 5) == "a</think>a"
    assert answer(5, 1, 5, stops=("</think>",)) == "aa"


def test_an_answer_does_not_begin_with_the_end_of_reasoning() -> None:
    transcript = Transcript(TOKENS.__getitem__, (), ReasoningStart.POSSIBLE, closed_by=1)
    assert [transcript.push([token_id]).content for token_id in (1, 5)] == ["", "a"]


def test_thinking_after_the_prompt_ended_it_is_read() -> None:
    transcript = Transcript(TOKENS.__getitem__, (), ReasoningStart.POSSIBLE, closed_by=1)
    passage = transcript.push([0, 5, 1, 5])
    assert (passage.content, passage.reasoning) == ("a", "a")


def test_without_a_tokenizer_tokens_are_no_text() -> None:
    transcript = Transcript(no_text, [], ReasoningStart.NONE)
    passage = transcript.push([1, 2, 3])
    assert (passage.content, passage.tokens) == ("", 3)


def test_reasoning_ends_at_the_token_and_not_at_its_letters() -> None:
    transcript = Transcript(TOKENS.__getitem__, (), ReasoningStart.OPEN, signs=TAGS)
    passage = transcript.push([5, 2, 3, 5, 1, 5, 2, 3])
    assert (passage.reasoning, passage.content) == ("a</think>a", "a</think>")


def test_reasoning_does_not_begin_at_the_letters_of_a_tag() -> None:
    transcript = Transcript([b"<thi", b"nk>", b"x"].__getitem__, (), ReasoningStart.POSSIBLE, signs=NO_SIGNS)
    assert transcript.push([0, 1, 2]).reasoning == "x"
    signs = Signs((THINK_OPEN,), {THINK_OPEN: 9}.get)
    transcript = Transcript([b"<thi", b"nk>", b"x"].__getitem__, (), ReasoningStart.POSSIBLE, signs=signs)
    assert transcript.push([0, 1, 2]).content == "<think>x"


@pytest.mark.parametrize(("stop", "content"), [("</think>b", "a"), ("ink>b", "a</th"), ("a</thi", "")])
def test_a_stop_string_counts_the_letters_of_a_token(stop: str, content: str) -> None:
    tokens = [b"<think>", b"</think>", b"a", b"b"]
    transcript = Transcript(tokens.__getitem__, (stop,), ReasoningStart.NONE, signs=TAGS)
    passage = transcript.push([2, 1, 3])
    assert (passage.content, passage.match) == (content, StopMatch(stop))


TAGS_OF_THOUGHTS = [THINK_OPEN, THINK_CLOSE]
MARKERS = [CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END, *TAGS_OF_THOUGHTS]
# Of V3.2's tags only the middle is a token.
TAGGED = ["function_calls>", 'invoke name="', "invoke>", 'parameter name="', "parameter>"]


@dataclass(frozen=True)
class Written:
    """What models of a format write. Markers are words, too; syntax: an expression for what calls take out or add."""

    form: ToolFormat
    words: list[str]
    markers: list[str]
    syntax: str

    def without_syntax(self, text: str) -> str:
        while (shorter := re.sub(self.syntax, "", text)) != text:
            text = shorter
        return text


ANSWERS = {
    "V3.1": Written(
        V31,
        [*MARKERS, "<｜tool▁", "call▁end｜>", "</th", "ink>", "name", '{"a": "', '"}', "\n", "x"],
        MARKERS,
        "|".join([*map(re.escape, MARKERS), r"\s"]),
    ),
    "V3.2": Written(
        V32,
        [DSML, *TAGS_OF_THOUGHTS, *TAGGED, "<", "</", '" string="true">', '">', "name", "\n", "</th", "x"],
        [DSML, *TAGS_OF_THOUGHTS],
        "|".join([f"</?{DSML}({'|'.join(TAGGED)})", ' string="true', *TAGS_OF_THOUGHTS, r"\\n", r'[\s{}:,>\\"]']),
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "letters"])
@given(
    ids=st.lists(st.integers(0, 15), max_size=16),
    start=st.sampled_from(ReasoningStart),
    cuts=st.sets(st.integers(1, 15)),
)
def test_an_answer_can_be_rebuilt_from_its_parts(
    kind: str, tokens: bool, ids: list[int], start: ReasoningStart, cuts: set[int]
) -> None:
    answer = ANSWERS[kind]
    words, without_syntax = answer.words, answer.without_syntax
    assert len(words) == 16
    signs = Signs(answer.markers, words.index) if tokens else NO_SIGNS
    tools = ToolReading(answer.form, parallel=True, opening="")
    transcript = Transcript([word.encode() for word in words].__getitem__, (), start, tools=tools, signs=signs)
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    passages = [transcript.push(ids[a:b]) for a, b in pairwise(edges)]
    passages.append(transcript.finish())
    parts = [passage.content + passage.reasoning for passage in passages]
    parts += [(call.name or "") + call.arguments for passage in passages for call in passage.calls]
    written = "".join(words[each] for each in ids)
    # The parts of one passage are not in the order in which they were written, and any letter may be one of a marker.
    lost = Counter(without_syntax(written)) - Counter("".join(parts))
    added = Counter(without_syntax("".join(parts))) - Counter(written)
    assert not lost and not added


def test_a_call_may_begin_in_the_midst_of_thoughts() -> None:
    words = ["so ", "<", DSML, "function_calls>\n", 'invoke name="clock">\n', "</", "invoke>"]
    signs = Signs([DSML], {DSML: 2}.get)
    tools = ToolReading(V32, parallel=True, opening="")
    transcript = Transcript(
        [word.encode() for word in words].__getitem__, (), ReasoningStart.OPEN, tools=tools, signs=signs
    )
    passage = transcript.push([0, 1, 2, 3, 1, 2, 4, 5, 2, 6])
    assert (passage.reasoning, passage.content, passage.calls[0].name) == ("so ", "", "clock")
