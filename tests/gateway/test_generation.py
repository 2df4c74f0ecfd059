import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation import Generation
from gateway.prepared import History, Prepared
from gateway.text.reasoning import ReasoningStart
from gateway.text.transcript import Transcript
from mesh.domain.outputs import CachedTokens, FinishReason, Logprobs
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.errors import InvalidRequest, SlowClient, WorkerLost
from tests.support.waiting import PATIENCE_SECONDS

PROMPT = [7, 8, 9]
LETTERS = {index: chr(ord("a") + index).encode() for index in range(26)}


def make_generation(
    *,
    stops: tuple[str, ...] = (),
    unread_limit: int = 100,
    interrupt: Callable[[], None] = lambda: None,
    history: History | None = None,
    **fields: Any,
) -> Generation:
    request = TokenRequest("r", PROMPT, Sampling(), StopConditions(fields.pop("max_tokens", 50)))
    transcript = Transcript(LETTERS.__getitem__, stops, ReasoningStart.NONE)
    return Generation(Prepared("m", request, lambda: transcript, [], history=history), 1e9, unread_limit, interrupt)


def test_tokens_that_were_not_read_share_one_delta() -> None:
    generation = make_generation()
    generation.receive(3, [0])
    generation.receive(4, [1, 2])
    delta = generation.drain()
    assert (list(delta.token_ids), delta.content, delta.finish) == ([0, 1, 2], "abc", None)


def test_the_token_log_is_prompt_and_tokens() -> None:
    generation = make_generation()
    generation.receive(3, [0, 1])
    continuation = generation.continuation(1)
    assert list(continuation.token_ids) == [*PROMPT, 0, 1]
    assert (continuation.prompt_tokens, continuation.stop.max_tokens) == (3, 48)
    assert (generation.next_position, generation.remaining_tokens) == (5, 48)


def test_tokens_that_an_earlier_call_received_are_not_counted_again() -> None:
    request = TokenRequest("r", PROMPT, Sampling(), StopConditions(50))
    history = History(array("I", [0, 1, 2]), None, 2)
    transcript = Transcript(LETTERS.__getitem__, (), ReasoningStart.NONE)
    generation = Generation(Prepared("m", request, lambda: transcript, [], history=history), 1e9, 100, lambda: None)
    generation.receive(6, [3, 4])
    assert (generation.received_tokens, generation.generated_tokens) == (5, 2)


def test_a_continued_answer_says_it_was_relaxed() -> None:
    request = TokenRequest("r", PROMPT, Sampling(), StopConditions(50))
    history = History(array("I", [0]), FinishReason.LENGTH, 0, relaxed=True)
    transcript = Transcript(LETTERS.__getitem__, (), ReasoningStart.NONE)
    generation = Generation(Prepared("m", request, lambda: transcript, [], history=history), 1e9, 100, lambda: None)
    finish = generation.drain().finish
    assert finish is not None and finish.relaxed


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=20))
def test_tokens_sent_again_are_dropped(moves: list[tuple[int, int]]) -> None:
    """A worker may repeat any tokens, from any position that the gateway has."""
    answer = [index % 26 for index in range(200)]
    generation = make_generation(unread_limit=1000)
    for back, count in moves:
        start = max(0, generation.received_tokens - back)
        generation.receive(3 + start, answer[start : start + count])
    assert list(generation.continuation(1).token_ids[3:]) == answer[: generation.received_tokens]


def test_repeated_tokens_do_not_repeat_their_logprobs() -> None:
    generation = make_generation()
    entries = [Logprobs(-float(index), [], []) for index in range(3)]
    generation.receive(3, [0, 1], entries[:2])
    generation.receive(4, [1, 2], entries[1:])
    delta = generation.drain()
    assert [entry.logprob for entry in delta.logprobs] == [0.0, -1.0, -2.0]


def test_a_gap_fails_the_generation() -> None:
    generation = make_generation()
    generation.receive(5, [0])
    failure = generation.pop_failure()
    assert failure is not None
    assert "skipped 2 tokens at position 3" in failure.message


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    generation = make_generation()
    generation.receive(3, [0], cached=CachedTokens(2, 1, 1))
    generation.receive(4, [1], cached=CachedTokens(3))
    generation.finish(FinishReason.LENGTH)
    finish = generation.drain().finish
    assert finish is not None
    assert finish.usage.cached == CachedTokens(2, 1, 1)


def test_the_stop_token_counts_and_is_not_text() -> None:
    generation = make_generation()
    generation.receive(3, [0, 25])
    generation.finish(FinishReason.STOP)
    delta = generation.drain()
    assert delta.finish is not None
    assert (delta.content, delta.finish.stop_token_id, delta.finish.usage.completion_tokens) == ("a", 25, 2)


@pytest.mark.parametrize("delivered", [0, 2, 3])
def test_a_continued_answer_tells_its_stop_token(delivered: int) -> None:
    history = History(array("I", [0, 1, 25]), FinishReason.STOP, delivered)
    delta = make_generation(history=history).drain()
    assert list(delta.token_ids) == [0, 1, 25][delivered:]
    assert delta.content == "ab"[delivered:]
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.stop_token_id) == (FinishReason.STOP, 25)
    assert delta.finish.usage.completion_tokens == 3


def test_nothing_follows_a_stop_string_that_the_client_had() -> None:
    generation = make_generation(stops=("cd",), history=History(array("I", range(7)), None, 4))
    delta = generation.drain()
    assert (list(delta.token_ids), delta.content, delta.position) == ([], "", 4)
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.stop_string) == (FinishReason.STOP, "cd")
    assert delta.finish.usage.completion_tokens == 4


@pytest.mark.parametrize(("stops", "reason"), [(("cd",), None), ((), FinishReason.LENGTH)])
def test_a_client_cannot_have_more_than_the_answer(stops: tuple[str, ...], reason: FinishReason | None) -> None:
    tokens = 4 if stops else 7
    make_generation(stops=stops, history=History(array("I", range(7)), reason, tokens)).drain()
    generation = make_generation(stops=stops, history=History(array("I", range(7)), reason, tokens + 1))
    with pytest.raises(InvalidRequest, match=f"ended with token {tokens}"):
        generation.drain()


def test_a_continued_answer_may_lag_its_client() -> None:
    generation = make_generation(history=History(array("I", range(3)), None, 5))
    assert generation.drain().empty
    generation.receive(6, [3, 4, 5])
    assert generation.drain().content == "f"


def test_a_long_continued_answer_makes_no_client_slow() -> None:
    interrupted: list[bool] = []
    history = History(array("I", [0] * 50), None, 49)
    generation = make_generation(unread_limit=10, history=history, interrupt=lambda: interrupted.append(True))
    generation.receive(53, [1] * 10)
    assert not interrupted
    generation.receive(63, [1])
    assert interrupted and isinstance(generation.given_up, SlowClient)


def test_nothing_after_a_stop_string_counts() -> None:
    generation = make_generation(stops=("cd",))
    generation.receive(3, [0, 1, 2])
    assert generation.drain().content == "ab"
    generation.receive(6, [3, 4, 5])
    delta = generation.drain()
    assert delta.finish is not None
    assert (delta.content, list(delta.token_ids), delta.finish.stop_string) == ("", [3], "cd")
    assert delta.finish.usage.completion_tokens == 4


def test_text_held_back_comes_with_the_end() -> None:
    generation = make_generation(stops=("cd",))
    generation.receive(3, [2])
    generation.finish(FinishReason.LENGTH)
    assert generation.drain().content == "c"


def test_only_the_first_end_counts() -> None:
    generation = make_generation()
    generation.finish(FinishReason.LENGTH)
    generation.fail(WorkerLost("late"))
    assert generation.pop_failure() is None


def test_a_failure_waits_until_every_token_was_read() -> None:
    generation = make_generation()
    generation.receive(3, [0])
    generation.fail(WorkerLost("gone"))
    assert generation.pop_failure() is None
    generation.drain()
    assert isinstance(generation.pop_failure(), WorkerLost)
    assert generation.pop_failure() is None


def test_a_client_that_leaves_too_much_unread_is_interrupted() -> None:
    interruptions: list[bool] = []
    generation = make_generation(unread_limit=3, interrupt=lambda: interruptions.append(True))
    generation.receive(3, [0, 1, 2])
    assert not interruptions
    generation.receive(6, [3])
    assert interruptions == [True]
    assert isinstance(generation.given_up, SlowClient)


async def test_a_waiting_reader_wakes_for_tokens_and_for_the_end() -> None:
    generation = make_generation()
    writes: list[Callable[[], None]] = [
        lambda: generation.receive(3, [0]),
        lambda: generation.finish(FinishReason.LENGTH),
    ]
    for write in writes:
        reader = asyncio.create_task(generation.readable())
        await asyncio.sleep(0)
        assert generation.awaited
        write()
        await asyncio.wait_for(reader, PATIENCE_SECONDS)
        generation.drain()
    assert not generation.awaited


async def test_a_reader_gets_tokens_when_due_ends_at_once() -> None:
    generation, clock = make_generation(), asyncio.get_running_loop().time
    generation.receive(3, [0])
    due = clock() + 0.03
    reader = asyncio.create_task(generation.readable(due))
    await asyncio.sleep(0)
    generation.receive(4, [1])
    await asyncio.wait_for(reader, PATIENCE_SECONDS)
    # Event loops round timers to milliseconds.
    assert clock() >= due - 0.001
    assert list(generation.drain().token_ids) == [0, 1]
    reader = asyncio.create_task(generation.readable(clock() + 60))
    await asyncio.sleep(0)
    generation.receive(5, [2])
    generation.finish(FinishReason.LENGTH)
    await asyncio.wait_for(reader, PATIENCE_SECONDS)
    assert list(generation.drain().token_ids) == [2]


def test_an_answer_some_of_whose_tokens_were_relaxed_says_so() -> None:
    generation = make_generation()
    generation.receive(3, [0], relaxed=True)
    generation.receive(4, [1])
    generation.finish(FinishReason.STOP)
    finish = generation.drain().finish
    assert finish is not None and finish.relaxed
