from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.server_sent_events import EventSplitter

BODY = b": a comment\n\ndata: one\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n"


@given(st.lists(st.integers(0, len(BODY))))
def test_events_are_the_same_however_the_body_is_cut(cuts: list[int]) -> None:
    bounds = sorted({0, len(BODY), *cuts})
    splitter = EventSplitter()
    chunks = [BODY[start:end] for start, end in pairwise(bounds)]
    assert [event for chunk in chunks for event in splitter.feed(chunk)] == [b"one", b"two", b"[DONE]"]


def test_an_unfinished_line_waits_for_its_end() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: o") == []
    assert splitter.feed(b"ne\n") == [b"one"]
