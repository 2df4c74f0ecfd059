"""What running answers will still take of a worker's blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.blocks import BLOCK_TOKENS
from mesh.costs import CostModel
from scheduler.placement.candidates import CandidateWorker, Unreported
from scheduler.placement.growth import PlacedAnswers, Times
from scheduler.placement.terms import Rejection, Terms
from tests.support.scheduling import make_candidate, make_constants, make_load, make_request, predict_alone

# A step takes 20 ms, however many requests it has.
COSTS = CostModel(decode_steps=((1.0, 20.0),))
LENGTH, PROMPT, POOL = 640, 640, 1000
TOKEN_SECONDS = 0.02


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=30), st.floats(0, 100))
def test_each_answer_grows_from_its_begin_to_its_end(answers: list[tuple[float, float]], now: float) -> None:
    ends = [begin + lasts for begin, lasts in answers]
    placed = PlacedAnswers(Times.of(sorted(begin for begin, _ in answers)), Times.of(sorted(ends)))
    left = [max(end - max(begin, now), 0) for (begin, _), end in zip(answers, ends, strict=True)]
    assert placed.tokens_left(now, TOKEN_SECONDS) == pytest.approx(sum(left) / TOKEN_SECONDS, rel=1e-6, abs=1e-6)


def terms(candidate: CandidateWorker) -> Terms:
    """No request may wait for a place."""
    request = make_request(prompt_tokens=PROMPT, mean_output_tokens=float(LENGTH), max_tokens=2000)
    return predict_alone(request, [candidate], make_constants(COSTS, queue_requests=0))[0]


def slots_left(candidate: CandidateWorker) -> int:
    return terms(candidate).slots_left


def running(drawn: int, requests: int = 20, known: int = 20) -> CandidateWorker:
    """Requests that each have drawn as many tokens, of which this scheduler placed `known`."""
    held = requests * (PROMPT + drawn) // BLOCK_TOKENS
    load = make_load(requests, free_blocks=POOL - held, decode_step_ms=1000 * TOKEN_SECONDS)
    begin = -drawn * TOKEN_SECONDS
    answers = PlacedAnswers(Times.of([begin] * known), Times.of([begin + LENGTH * TOKEN_SECONDS] * known))
    return make_candidate(total_blocks=POOL, max_requests=200, load=load, answers=answers)


def test_slots_left_do_not_shrink_while_answers_grow() -> None:
    # Of 1,000 blocks 20 whole requests of 20 blocks leave 600.
    assert [slots_left(running(drawn)) for drawn in (0, 320, 576)] == [30] * 3


def test_a_request_that_fits_now_is_not_refused() -> None:
    full = running(0, requests=50, known=50)
    assert (slots_left(full), terms(full).rejection) == (0, None)
    assert terms(running(LENGTH, requests=50, known=50)).rejection is Rejection.FULL


def test_answers_of_other_schedulers_are_half_done() -> None:
    # 600 blocks are free, of which each request is expected to take five more.
    assert slots_left(running(LENGTH, known=0)) == 25


def test_an_answer_beyond_the_mean_takes_no_more() -> None:
    # It has taken a block more already.
    assert slots_left(running(LENGTH + 64)) == 29


def test_requests_that_wait_count_once() -> None:
    load = make_load(free_blocks=POOL, waiting_requests=20, decode_step_ms=1000 * TOKEN_SECONDS)
    later = PlacedAnswers(Times.of([9.0] * 20), Times.of([9.0 + LENGTH * TOKEN_SECONDS] * 20))
    waiting = make_candidate(total_blocks=POOL, max_requests=200, load=load, answers=later)
    assert slots_left(waiting) == 30
    # So do those that are on their way, whose prompts take ten blocks each.
    coming = make_candidate(
        total_blocks=POOL,
        max_requests=200,
        load=make_load(free_blocks=POOL, decode_step_ms=1000 * TOKEN_SECONDS),
        unreported=Unreported(20, 0, 200),
        answers=later,
    )
    assert slots_left(coming) == 30
