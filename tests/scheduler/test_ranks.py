"""When a rank will have computed its prompts, from what was placed on it and what it reports."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.costs import CostModel
from mesh.domain.workers import PromptPace, RankStatus, TransferCounters
from scheduler.placement.candidates import Candidates, Unreported
from scheduler.placement.constants import Constants
from scheduler.placement.estimates import paces
from scheduler.placement.placed_work import Answer, PlacedWork
from scheduler.ranks import OVERDUE_SECONDS, Rank
from tests.support.scheduling import make_candidate, make_load, make_rank

RATE = 1000.0


def status(queued: int, rate: float | None = RATE) -> RankStatus:
    load = make_load(queued_prefill_tokens=queued, prefill_tokens_per_second=rate)
    return RankStatus(load, TransferCounters(), 0)


def place(rank: Rank, number: int, now: float, tokens: int) -> None:
    rank.add_placement((str(number), 0), now, PlacedWork(Unreported(1, tokens, 1), tokens / RATE))


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 800)), min_size=1, max_size=20))
def test_a_rank_is_free_once_all_is_computed(prompts: list[tuple[int, int]]) -> None:
    """Each prompt comes this many ms after the one before it. A step computes all that is there when it begins."""
    rank, now, free_at, waiting = make_rank(), 0.0, 0.0, 0
    for number, (gap_ms, tokens) in enumerate(prompts):
        now += gap_ms / 1000
        while free_at <= now:
            rank.observe(status(waiting), free_at)
            if not waiting:
                free_at = now
                break
            free_at, waiting = free_at + waiting / RATE, 0
        place(rank, number, now, tokens)
        waiting += tokens
        assert rank.prompts_until == pytest.approx(free_at + waiting / RATE)


def test_prompts_that_another_scheduler_placed_count_once_they_are_reported() -> None:
    rank = make_rank()
    rank.observe(status(2000), 5.0)
    assert rank.prompts_until == 7.0


def test_a_quicker_rank_is_free_once_it_says_so() -> None:
    rank = make_rank()
    place(rank, 0, 0.0, 4000)
    rank.observe(status(1000), 1.0)
    place(rank, 1, 1.5, 500)
    assert rank.prompts_until == 4.5
    rank.observe(status(0), 2.0)
    assert rank.prompts_until == 2.5


def test_a_report_that_says_nothing_new_changes_nothing() -> None:
    rank = make_rank()
    rank.observe(status(1000), 0.0)
    rank.observe(status(1000), 0.9)
    assert rank.prompts_until == 1.0


def test_a_rank_without_measurements_is_free_after_its_prompts() -> None:
    rank = make_rank()
    rank.observe(status(3000, rate=None), 0.0)
    assert rank.prompts_until is None
    place(rank, 0, 1.0, 500)
    assert rank.prompts_until == 1.5


def test_prompts_that_never_came_do_not_block_a_rank() -> None:
    """Its load stays as it is, and says nothing of them."""
    rank = make_rank()
    rank.observe(status(0), 0.0)
    place(rank, 0, 1.0, 500)
    for number in range(1, 100):
        place(rank, number, 1.0, 4000)
        rank.settle_placement((str(number), 0))
    assert rank.prompts_until == pytest.approx(1.5)


def test_a_report_contains_what_came_before_its_step_began() -> None:
    rank = make_rank()
    rank.observe(status(0), 1.0)
    place(rank, 0, 1.05, 500)
    rank.observe(status(500), 1.1)
    place(rank, 1, 1.15, 500)
    assert rank.unreported.requests == 2
    rank.observe(status(0), 1.2)
    assert rank.unreported.requests == 1


def ends_of(rank: Rank, running: int, most: int) -> list[float]:
    load = make_load(running_requests=running)
    rank.observe(RankStatus(load, TransferCounters(), 0), 1.0)
    return list(rank.known_ends(most))


def test_ends_are_known_if_all_requests_were_placed_here() -> None:
    rank = make_rank()
    for number, ends_at in enumerate((9.0, 7.0, 8.0)):
        rank.add_placement((str(number), 0), 0.0, PlacedWork(Unreported(1, 0, 1), answer=Answer(0.0, 1.0, ends_at)))
    rank.settle_placements_before(0.5)
    assert ends_of(rank, 3, 3) == [7.0, 8.0, 9.0]
    # It has room, or another scheduler's request.
    assert ends_of(rank, 3, 4) == []
    assert ends_of(rank, 4, 4) == []
    rank.settle_placement(("1", 0))
    assert ends_of(rank, 2, 2) == [8.0, 9.0]


def test_a_request_is_forgotten_once_it_must_have_ended() -> None:
    rank = make_rank()
    rank.add_placement(("r", 0), 0.0, PlacedWork(Unreported(1, 0, 1), answer=Answer(0.0, 0.4, 0.5)))
    rank.settle_placements_before(0.5)
    rank.observe(status(0), 1.0)
    assert len(rank.answers) == 1
    rank.observe(status(0), 0.6 + OVERDUE_SECONDS)
    assert len(rank.answers) == 0


def test_steps_without_prompts_are_told_from_those_with_some() -> None:
    rank = make_rank()
    # When each step ends, the prompt tokens that the next one computes, and the mean that the rank measures.
    for ended, queued, step_ms in ((1.0, 0, 100.0), (1.1, 200, 101.0), (1.4, 0, 140.0), (1.5, 0, 130.0)):
        load = make_load(running_requests=2, queued_prefill_tokens=queued, decode_step_ms=step_ms)
        rank.observe(RankStatus(load, TransferCounters(), 0), ended)
    assert rank.quiet_step_ms == pytest.approx(100.0)


def test_a_step_may_have_an_unreported_prompt() -> None:
    rank = make_rank()
    rank.observe(RankStatus(make_load(running_requests=1, decode_step_ms=100.0), TransferCounters(), 0), 1.0)
    place(rank, 0, 1.05, 200)
    for ended, step_ms in ((1.1, 101.0), (1.4, 140.0)):
        load = make_load(running_requests=2, decode_step_ms=step_ms)
        rank.observe(RankStatus(load, TransferCounters(), 0), ended)
    assert rank.quiet_step_ms == pytest.approx(100.0)


def test_a_placement_that_is_made_again_counts_once() -> None:
    rank = make_rank()
    for _ in range(3):
        place(rank, 0, 1.0, 500)
    assert rank.prompts_until == pytest.approx(1.5)


def test_waiting_prompts_count_at_their_kinds_pace() -> None:
    load = make_load(
        queued_prefill_tokens=10_000,
        queued_sparse_tokens=8000,
        exact_prompts=PromptPace(1000.0),
        sparse_prompts=PromptPace(4000.0),
    )
    rank = make_rank()
    rank.observe(RankStatus(load, TransferCounters(), 0), 0.0)
    assert rank.prompts_until == 4.0
    # A sparse prompt that the load does not show yet counts as long as it is predicted to take.
    rank.add_placement(("r", 0), 1.0, PlacedWork(Unreported(1, 8000, 1), 2.0))
    rank.observe(RankStatus(msgspec.structs.replace(load, queued_prefill_tokens=8000), TransferCounters(), 0), 1.01)
    assert rank.prompts_until == pytest.approx(1.01 + 2.0 + 2.0)


def test_placement_counts_what_is_left_of_the_prompts_by_then() -> None:
    worker = make_candidate(prompts_until=3.0, load=make_load(queued_prefill_tokens=100_000))
    ((pace,), _) = paces(Candidates([worker]), Constants())
    assert [worker.prompts_ms(now, pace, CostModel()) for now in (1.0, 2.75, 4.0)] == [2000.0, 250.0, 0.0]
