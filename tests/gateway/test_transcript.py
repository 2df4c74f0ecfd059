from hypothesis import given
from hypothesis import strategies as st

from gateway.reasoning import ReasoningStart
from gateway.transcript import Transcript, no_text

TOKENS = [b"<think>", b"</think>", b"</th", b"ink>", b"\n", b"a", b"ST", b"OP", b"\xe4\xbd", b"\xa0"]
IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)


def read(groups: list[list[int]], stops: list[str], start: ReasoningStart) -> tuple[str, str, int, int, object]:
    transcript = Transcript(TOKENS.__getitem__, stops, start)
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


@given(
    IDS, st.lists(st.integers(0, 12)), st.sampled_from([[], ["STOP"], ["\n", "aS"]]), st.sampled_from(ReasoningStart)
)
def test_the_answer_does_not_depend_on_how_tokens_were_grouped(
    token_ids: list[int], cuts: list[int], stops: list[str], start: ReasoningStart
) -> None:
    cuts = sorted(min(cut, len(token_ids)) for cut in cuts)
    groups = [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    assert read(groups, stops, start) == read([[token_id] for token_id in token_ids], stops, start)


def test_tokens_from_the_opening_to_the_closing_tag_are_reasoning() -> None:
    transcript = Transcript(TOKENS.__getitem__, [], ReasoningStart.POSSIBLE)
    transcript.push([0, 5, 5, 1, 5])
    assert transcript.reasoning_tokens == 4


def test_reasoning_that_the_prompt_has_ended_is_not_ended_again_in_the_answer() -> None:
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


def test_a_model_that_thinks_though_the_prompt_ended_it_is_read_as_one_that_thinks() -> None:
    transcript = Transcript(TOKENS.__getitem__, (), ReasoningStart.POSSIBLE, closed_by=1)
    passage = transcript.push([0, 5, 1, 5])
    assert (passage.content, passage.reasoning) == ("a", "a")


def test_without_a_tokenizer_tokens_are_no_text() -> None:
    transcript = Transcript(no_text, [], ReasoningStart.NONE)
    passage = transcript.push([1, 2, 3])
    assert (passage.content, passage.tokens) == ("", 3)
