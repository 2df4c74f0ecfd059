"""Steps that compute prompts while requests decode, and end in a set time."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pace.mixed_steps import (
    EVEN,
    FEW_ANSWERS,
    FEWEST_TOKENS,
    FIRST_TOKENS,
    MOST_STEPS,
    SEEN,
    UNBOUNDED,
    WORTHWHILE,
    MixedSteps,
)
from mesh.domain.workers import PromptPace, WorkerSpeed
from mesh.tails import MOST_TOKENS


def converged(mixed: MixedSteps, seconds: Callable[[int], float], steps: int = 40) -> int:
    tokens = 0
    for _ in range(steps):
        found = mixed.most_prompt_tokens(0).all
        assert found is not None
        tokens = found
        mixed.launched(tokens > 0, True)
        mixed.observe(seconds(tokens), tokens)
    return tokens


@given(st.floats(1, 50), st.floats(1, 200), st.floats(0, 0.7), st.floats(0.01, 1))
def test_steps_come_to_take_what_they_may(without_ms: float, room_ms: float, fixed: float, token_ms: float) -> None:
    """fixed: the share of the room that any prompt takes."""
    mixed = MixedSteps(without_ms + room_ms)
    for _ in range(3):
        mixed.observe(without_ms / 1000, 0)
    tokens = converged(mixed, lambda tokens: (without_ms + fixed * room_ms + token_ms * tokens) / 1000)
    fits = room_ms * (1 - fixed) / token_ms
    assert tokens == pytest.approx(max(fits, FEWEST_TOKENS), rel=0.1, abs=2)


def test_chunks_become_smaller_as_tokens_take_longer() -> None:
    mixed = MixedSteps(40.0)
    mixed.observe(0.01, 0)
    assert converged(mixed, lambda tokens: (10 + 0.05 * tokens) / 1000) == pytest.approx(600, abs=1)
    assert converged(mixed, lambda tokens: (10 + 0.2 * tokens) / 1000) == pytest.approx(150, abs=1)


def test_a_first_step_takes_few_tokens_unless_unbounded() -> None:
    assert MixedSteps(30.0).most_prompt_tokens(0).all == FIRST_TOKENS
    unlimited = MixedSteps(None)
    unlimited.observe(1.0, 64)
    assert unlimited.most_prompt_tokens(0) == UNBOUNDED


def launched_by_the_host(tokens: int) -> float:
    """Seconds of a step whose chunks the host launches, which takes at least 170 ms."""
    return (170 + 0.3 * tokens) / 1000


def as_rows(tokens: int) -> float:
    return (20 + 0.25 * tokens) / 1000


@pytest.mark.parametrize(("step_ms", "rows"), [(30.0, 40), (45.0, 100), (60.0, 128), (23.0, 16)])
def test_few_tokens_are_rows_where_no_chunk_ends_in_time(step_ms: float, rows: int) -> None:
    mixed, taken = MixedSteps(step_ms), []
    mixed.observe(0.02, 0)
    for _ in range(2000):
        tokens = mixed.most_prompt_tokens(500).all
        assert tokens is not None
        taken.append(tokens)
        if tokens <= MOST_TOKENS:
            mixed.observe(as_rows(tokens), 0, row_tokens=tokens)
        else:
            mixed.launched(tokens > 0, True)
            mixed.observe(launched_by_the_host(tokens), tokens)
    # Chunks are tried again after some time.
    chunks = [tokens for tokens in taken if tokens > MOST_TOKENS]
    assert 1 < len(chunks) < len(taken) / 40
    assert sorted(taken)[len(taken) // 2] == pytest.approx(rows, abs=1)


def test_longer_steps_are_chunks() -> None:
    mixed, tokens = MixedSteps(400.0), 0
    mixed.observe(0.02, 0)
    for _ in range(100):
        tokens = mixed.most_prompt_tokens(500).all or 0
        assert tokens > MOST_TOKENS
        mixed.launched(tokens > 0, True)
        mixed.observe(launched_by_the_host(tokens), tokens)
    assert launched_by_the_host(tokens) == pytest.approx(0.4, rel=0.05)


@given(st.floats(0.05, 0.9), st.floats(1, 50), st.floats(0.2, 500), st.sampled_from([0, 1]))
def test_prompts_take_their_share_of_the_time(share: float, without_ms: float, prompt_ms: float, ahead: int) -> None:
    """ahead: steps that are launched before the one before them is observed."""
    mixed = MixedSteps(None, share)
    mixed.observe(without_ms / 1000, 0)
    taken, whole, flight = 0.0, 0.0, []
    for _ in range(4000):
        prompts = mixed.most_prompt_tokens(0).all != 0
        mixed.launched(prompts, True)
        flight.append(prompts)
        if len(flight) > ahead:
            prompts = flight.pop(0)
            taken += prompt_ms * prompts
            whole += without_ms + prompt_ms * prompts
            mixed.observe((without_ms + prompt_ms * prompts) / 1000, 1000 * prompts)
    # After each step with prompts others follow until the share is kept: at most one too many, and those that were
    # launched ahead.
    least = prompt_ms / (prompt_ms / share + (2 + ahead) * without_ms)
    # The last prompt's time may not have been made up for yet.
    assert least <= taken / whole and taken - prompt_ms <= share * whole * 1.001


def test_prompts_owe_nothing_while_no_request_decodes() -> None:
    mixed = MixedSteps(None, 0.5)
    for _ in range(3):
        mixed.launched(True, False)
        assert mixed.most_prompt_tokens(0) == UNBOUNDED
        mixed.observe(1.0, 1000, decodes=False)
    mixed.launched(True, True)
    assert mixed.most_prompt_tokens(0).all == 0


@given(st.floats(0.1, 0.8), st.floats(-60, 60), st.integers(0, 1000))
def test_prompts_of_ranks_whose_clocks_differ_begin_together(share: float, late_ms: float, seed: int) -> None:
    ranks, random_ms = (MixedSteps(None, share), MixedSteps(None, share)), random.Random(seed)
    for rank in ranks:
        rank.observe(0.03, 0)
    begun = 0
    for _ in range(500):
        prompts = {rank.most_prompt_tokens(0).all != 0 for rank in ranks}
        assert len(prompts) == 1
        tokens = 1000 * prompts.pop()
        begun += tokens > 0
        owes = any(rank.owes for rank in ranks) or tokens > 0
        for rank, off_ms in zip(ranks, (0, late_ms), strict=True):
            rank.launched(tokens > 0, True)
            rank.agreed(owes)
            ms = random_ms.gauss(30, 1) + bool(tokens) * (300 + off_ms)
            rank.observe(ms / 1000, tokens)
    assert begun >= 500 / (3 + 360 / 30 * (1 - share) / share)
    assert 300 * (begun - 1) <= share * (300 * begun + 30 * 500) * 1.02


@given(st.floats(5, 50), st.floats(0, 0.5), st.floats(0.02, 0.2), st.floats(5, 50))
def test_even_steps_follow_what_steps_without_prompts_take(
    quiet_ms: float, fixed: float, token_ms: float, later_ms: float
) -> None:
    """fixed: the share of a quiet step that any prompt adds."""
    mixed = MixedSteps("auto", speed=WorkerSpeed(quiet_ms, 8.0, PromptPace(1000 / token_ms)))
    for without_ms in (quiet_ms, later_ms):
        for _ in range(40):
            mixed.observe(without_ms / 1000, 0)
        added_ms = fixed * without_ms
        tokens = converged(mixed, lambda tokens: (without_ms + added_ms + token_ms * tokens) / 1000)  # noqa: B023
        step_ms = without_ms + added_ms + token_ms * tokens
        even_ms = max(EVEN * without_ms, without_ms + (1 + WORTHWHILE) * added_ms)
        assert step_ms == pytest.approx(even_ms, rel=0.15) or tokens == FEWEST_TOKENS


def test_even_steps_are_known_before_the_first() -> None:
    speed = WorkerSpeed(20.0, 8.0, PromptPace(10_000.0))
    assert MixedSteps("auto", speed=speed).most_prompt_tokens(0).all == pytest.approx((EVEN - 1) * 200, abs=1)
    assert MixedSteps("auto").most_prompt_tokens(0) == UNBOUNDED


def test_steps_grow_while_many_prompts_wait() -> None:
    mixed = MixedSteps("auto", speed=WorkerSpeed(20.0, 8.0, PromptPace(10_000.0)))
    few, many = (mixed.most_prompt_tokens(0, queued, decoding=9).all for queued in (1000, 100_000))
    assert few == pytest.approx((EVEN - 1) * 200, abs=1) and many == -(-100_000 // MOST_STEPS)


@pytest.mark.parametrize(
    ("prompts", "decoding", "even"),
    [
        pytest.param(1, 1, True, id="one of each"),
        pytest.param(2, FEW_ANSWERS, False, id="few answers"),
        pytest.param(2, FEW_ANSWERS + 1, True, id="many answers"),
        pytest.param(5, 4 * FEW_ANSWERS, False, id="many prompts"),
        pytest.param(1, 0, False, id="no answer here"),
    ],
)
def test_few_answers_wait_for_many_prompts(prompts: int, decoding: int, even: bool) -> None:
    mixed = MixedSteps("auto", speed=WorkerSpeed(20.0, 8.0, PromptPace(10_000.0)))
    assert (mixed.most_prompt_tokens(0, 1000, prompts, decoding) != UNBOUNDED) == even


def test_chunks_are_worth_what_any_chunk_adds() -> None:
    """A chunk reads weights that the few requests which decode do not."""
    mixed = MixedSteps("auto", speed=WorkerSpeed(6.0, 8.0, PromptPace(40_000.0)))
    tokens = converged(mixed, lambda tokens: (6 + 13 + 0.025 * tokens) / 1000)
    assert tokens == pytest.approx(WORTHWHILE * 13 / 0.025, rel=0.02)


@pytest.mark.parametrize("slow_ms", [40.0, 300.0])
@pytest.mark.parametrize("slow", [0, 1, 7])
def test_one_slow_step_changes_no_chunk(slow: int, slow_ms: float) -> None:
    """slow: number of the step that the host holds up, of those with prompts."""
    mixed = MixedSteps("auto", speed=WorkerSpeed(10.0, 8.0, PromptPace(100_000.0)))
    found = set()
    for step in range(20):
        tokens = mixed.most_prompt_tokens(0).all or 0
        found.add(tokens)
        mixed.launched(True, True)
        mixed.observe((10 + 0.01 * tokens + slow_ms * (step == slow)) / 1000, tokens)
        mixed.observe(0.01, 0)
    assert min(found) >= max(found) - 1


@pytest.mark.parametrize("later_ms", [5.0, 10.0, 25.0])
def test_steps_with_prompts_show_what_answers_take_alone(later_ms: float) -> None:
    """More answers run after a while, or fewer, and every step has prompts."""
    added_ms, token_ms = 3.0, 0.01
    mixed = MixedSteps("auto", speed=WorkerSpeed(10.0, 8.0, PromptPace(1000 / token_ms)))
    converged(mixed, lambda tokens: (10 + added_ms + token_ms * tokens) / 1000, SEEN)
    tokens = converged(mixed, lambda tokens: (later_ms + added_ms + token_ms * tokens) / 1000)
    room_ms = (EVEN - 1) * later_ms
    assert tokens == pytest.approx(max(room_ms - added_ms, WORTHWHILE * added_ms) / token_ms, rel=0.02)


def test_chunks_are_larger_where_answers_read_the_same_weights() -> None:
    mixed = MixedSteps("auto", speed=WorkerSpeed(10.0, 8.0, PromptPace(100_000.0)))
    for _ in range(40):
        mixed.observe(0.01, 0)
    tokens = converged(mixed, lambda tokens: (10 - 5 + 0.01 * tokens) / 1000)
    assert tokens == pytest.approx((EVEN * 10 - 5) / 0.01, rel=0.02)


def divided_or_alone(tokens: int) -> float:
    """Seconds of a step of four ranks, which compute a chunk of 512 tokens and more together."""
    return (20 + 5 + 0.1 * tokens / (4 if tokens >= 512 else 1)) / 1000


def test_chunks_that_ranks_divide_are_measured_apart() -> None:
    mixed = MixedSteps(44.0, divided_tokens=512)
    mixed.observe(0.02, 0)
    for _ in range(60):
        most = mixed.most_prompt_tokens(0)
        assert most.all is not None and most.alone is not None
        for tokens in (most.all, 0, most.alone):
            mixed.launched(tokens > 0, True)
            mixed.observe(divided_or_alone(tokens) if tokens else 0.02, tokens)
    assert most.all == pytest.approx((44 - 20 - 5) / 0.025, rel=0.05)
    assert most.alone == pytest.approx((44 - 20 - 5) / 0.1, rel=0.05)


def test_even_chunks_that_ranks_divide_are_known_before_the_first() -> None:
    speed = WorkerSpeed(20.0, 8.0, PromptPace(10_000.0))
    most = MixedSteps("auto", divided_tokens=512, speed=speed, ranks=4).most_prompt_tokens(0)
    assert most.all == pytest.approx((EVEN - 1) * 20 / 0.025, abs=1)
    assert most.alone == pytest.approx((EVEN - 1) * 20 / 0.1, abs=1)


def test_chunks_that_ranks_divide_are_never_smaller() -> None:
    mixed = MixedSteps(2.0, divided_tokens=512)
    mixed.launched(chunks=True, decodes=True)
    mixed.observe(1.0, 512)
    assert mixed.most_prompt_tokens(0).all == 512
