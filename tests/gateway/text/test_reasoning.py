import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.reasoning import ReasoningSplitter, ReasoningStart

TEXT = st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "\n", " ", "a", "think>"]), max_size=8).map(
    "".join
)


def split(pieces: list[str], start: ReasoningStart) -> tuple[str, str]:
    splitter = ReasoningSplitter(start)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(content for content, _ in parts), "".join(reasoning for _, reasoning in parts)


@given(TEXT, st.sampled_from(list(ReasoningStart)))
def test_the_split_is_the_same_however_text_is_cut(text: str, start: ReasoningStart) -> None:
    assert split(list(text), start) == split([text], start)


@pytest.mark.parametrize(
    ("text", "start", "content", "reasoning"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", ReasoningStart.POSSIBLE, "because", "why\n"),
        (" \n<think>why</think>because", ReasoningStart.POSSIBLE, "because", "why"),
        ("why</think>\n\nbecause", ReasoningStart.OPEN, "because", "why"),
        ("never closed </th", ReasoningStart.OPEN, "", "never closed </th"),
        ("no reasoning", ReasoningStart.POSSIBLE, "no reasoning", ""),
        ("say <think> aloud</think>", ReasoningStart.POSSIBLE, "say <think> aloud</think>", ""),
        ("<think>a</think>b<think>c</think>", ReasoningStart.POSSIBLE, "b<think>c</think>", "a"),
        ("<think>a</think>", ReasoningStart.NONE, "<think>a</think>", ""),
    ],
)
def test_one_block_at_the_start_is_reasoning(text: str, start: ReasoningStart, content: str, reasoning: str) -> None:
    assert split([text], start) == (content, reasoning)


@given(TEXT, st.integers(0, 8))
def test_what_interrupts_reasoning_belongs_to_the_content(text: str, place: int) -> None:
    text = f"{text[:place]}<call>{text[place:]}"
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(ReasoningStart.OPEN, interrupt="<call>")
        parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
        assert "<call>" in "".join(content for content, _ in parts)


def test_content_that_cannot_be_a_tag_is_not_held_back() -> None:
    splitter = ReasoningSplitter(ReasoningStart.POSSIBLE)
    assert splitter.push("<th") == ("", "")
    assert splitter.push("ermo>") == ("<thermo>", "")
