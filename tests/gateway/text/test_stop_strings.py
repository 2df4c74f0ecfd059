import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_strings import StopMatch, StopStrings

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def first_to_complete(text: str, stops: list[str]) -> tuple[str, StopMatch | None]:
    """By the definition: the shortest beginning of the text that ends with a stop string, the longest such string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], StopMatch(longest)
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, StopMatch | None]:
    watcher, emitted = StopStrings(stops), ""
    for piece in pieces:
        text, match = watcher.push(piece)
        emitted += text
        if match is not None:
            return emitted, match
    return emitted + watcher.finish(), None


@given(st.lists(st.text("ab\nc", max_size=5), max_size=10), STOPS)
def test_the_first_stop_string_ends_the_text(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == first_to_complete("".join(pieces), stops)


@given(st.text("abc", max_size=20), STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    emitted, match = StopStrings(stops).push(text)
    if match is None:
        held = text.removeprefix(emitted)
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("pieces", [["say STOP now"], ["say S", "TOP", " now"], list("say STOP now")])
def test_only_text_before_the_stop_string_is_kept(pieces: list[str]) -> None:
    assert run(pieces, ["STOP"]) == ("say ", StopMatch("STOP"))


def test_a_false_start_is_released_at_once() -> None:
    watcher = StopStrings(["\n\nHuman"])
    assert watcher.push("one\n") == ("one", None)
    assert watcher.push("two") == ("\ntwo", None)
