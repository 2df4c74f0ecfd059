from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from engine.plan.batcher import MOST_PASSED_OVER
from engine.plan.step_plan import Candidate, Limits, PromptLimits
from tests.support.step_plans import (
    LIMITS,
    Request,
    Situation,
    alike,
    candidate,
    chunks_of,
    plan,
    request_of,
    running,
    situations,
)


def test_decoding_requests_come_before_prompts_in_the_budget() -> None:
    decoding = [running(0, 11, 10, [0]), running(1, 11, 10, [1])]
    step = plan(decoding, waiting=[candidate(2, 1000)])
    assert step.decoding == decoding
    assert chunks_of(step) == [(2, 254)]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    prompt = running(0, 600, 256, range(10))
    assert chunks_of(plan(prompts=[prompt])) == [(0, 256)]
    assert chunks_of(plan(prompts=[running(0, 600, 512, range(10))])) == [(0, 88)]


def test_running_prompts_continue_before_new_ones_start() -> None:
    step = plan(prompts=[running(5, 300, 256, range(5))], waiting=[candidate(1, 300)])
    assert chunks_of(step) == [(5, 44), (1, 212)]


def test_running_prompts_go_by_arrival_and_then_by_length() -> None:
    late, long, short = (
        running(2, 100, 0, [0, 1]),
        request_of((1, 0), 300, 0, [2, 3, 4, 5, 6]),
        request_of((1, 1), 90, 0, [7, 8]),
    )
    step = plan(prompts=[late, long, short])
    assert [chunk.request for chunk in step.chunks] == [short, long]
    assert [chunk.tokens for chunk in step.chunks] == [90, 166]


def test_a_cached_prefix_is_not_computed() -> None:
    assert chunks_of(plan(waiting=[candidate(0, 200, cached_blocks=3)])) == [(0, 8)]


def test_tokens_computed_again_wait_for_a_step_with_room() -> None:
    rewound, fresh = request_of((1, 0), 200, 0, range(4)), replace(candidate(2, 200, cached_blocks=3), computed_again=3)
    rewound.progress.rewind = 3
    rewound.progress.landed(192)
    for left, expected in ((2, []), (3, [(1, 3)]), (13, [(1, 11)]), (14, [(1, 11), (2, 3)])):
        first = running(0, 256 - left, 0, range(4, 8))
        step = plan(prompts=[first, rewound], waiting=[fresh])
        assert chunks_of(step) == [(0, 256 - left), *expected]


def test_a_prompt_waits_for_blocks_that_this_step_computes() -> None:
    first, second, other = (
        alike(candidate(arrival, 100), [content]) for arrival, content in enumerate([b"a", b"a", b"b"])
    )
    step = plan(waiting=[first, second, other])
    assert step.admitted == [first, other]


def test_a_prompt_waits_while_an_equal_one_is_computed() -> None:
    long = running(0, 600, 256, range(10))
    long.contents = contents = [bytes([index]) for index in range(9)]
    limits = Limits(max_step_tokens=400, max_requests=8)
    assert (
        plan(prompts=[long], waiting=[alike(candidate(1, 600, cached_blocks=4), contents)], limits=limits).admitted
        == []
    )
    # A prompt with another next block does not wait.
    unlike = alike(candidate(1, 600, cached_blocks=4), [*contents[:4], b"x"])
    assert plan(prompts=[long], waiting=[unlike], limits=limits).admitted == [unlike]


def test_a_prompt_waits_for_blocks_of_a_step_in_flight() -> None:
    earlier = running(0, 129, 0, range(3))
    earlier.contents = contents = [b"a", b"b"]
    earlier.progress.launched(128, 0, 0)
    waiting = alike(candidate(1, 129), contents)
    assert plan([earlier], waiting=[waiting]).admitted == []
    earlier.progress.committed(128, 0, ())
    earlier.progress.registered(2)
    cached = alike(candidate(1, 129, cached_blocks=2), contents)
    assert plan([earlier], waiting=[cached]).admitted == [cached]


def test_prompts_that_are_passed_over_take_no_places() -> None:
    equal = [alike(candidate(arrival, 100), [b"a"]) for arrival in range(3)]
    other = alike(candidate(3, 100), [b"b"])
    step = plan(waiting=[*equal, other], limits=Limits(max_step_tokens=400, max_requests=2))
    assert step.admitted == [equal[0], other]


def test_few_are_passed_over_in_a_step() -> None:
    read = []

    def queue() -> Iterator[Candidate[Request]]:
        for arrival in range(1000):
            read.append(arrival)
            yield alike(candidate(arrival, 100), [b"a"])

    assert len(plan(waiting=queue(), limits=Limits(10_000, 1000), free_blocks=10_000).admitted) == 1
    # The queue is read up to one request further.
    assert len(read) == 1 + MOST_PASSED_OVER + 1


def test_no_request_overtakes_one_that_does_not_fit() -> None:
    step = plan([running(0, 11, 10, [0])], waiting=[candidate(1, 640), candidate(2, 10)], free_blocks=5)
    assert step.admitted == []


def test_admission_leaves_every_running_request_a_block_to_grow_by() -> None:
    decoding = [running(0, 11, 10, [0]), running(1, 11, 10, [1])]
    assert plan(decoding, waiting=[candidate(2, 128)], free_blocks=3).admitted == []
    assert len(plan(decoding, waiting=[candidate(2, 128)], free_blocks=4).admitted) == 1


def test_a_request_that_needs_the_whole_pool_is_admitted_alone() -> None:
    assert len(plan(waiting=[candidate(0, 640)], free_blocks=10).admitted) == 1


def test_no_more_run_than_max_requests() -> None:
    waiting = [candidate(arrival, 10) for arrival in range(20)]
    assert len(plan([running(0, 11, 10, [0])], waiting=waiting).admitted) == LIMITS.max_requests - 1


def test_the_queue_is_read_no_further_than_needed() -> None:
    read = []

    def queue() -> Iterator[Candidate[Request]]:
        for arrival in range(1000):
            read.append(arrival)
            yield candidate(arrival, 200)

    plan(waiting=queue())
    assert len(read) == 3


def test_a_request_at_the_end_of_its_blocks_grows() -> None:
    full, roomy = running(0, 65, 64, [0]), running(1, 64, 63, [1])
    step = plan([full, roomy], free_blocks=1)
    assert step.growing == [full]
    assert step.preempted == []


def test_a_request_that_awaits_kv_takes_blocks_and_no_tokens() -> None:
    landing = replace(candidate(0, 200), waits=True)
    step = plan(waiting=[landing, candidate(1, 100)], free_blocks=7)
    assert step.admitted[0] is landing
    assert chunks_of(step) == [(1, 100)]


def test_a_request_that_awaits_kv_needs_no_token_budget() -> None:
    landing = replace(candidate(1, 200), waits=True)
    step = plan(prompts=[running(0, 600, 0, range(10))], waiting=[landing, candidate(2, 10)])
    assert step.admitted == [landing]


def test_suspended_requests_count_among_those_that_run_and_will_grow() -> None:
    assert plan(waiting=[candidate(0, 10)], suspended=8).admitted == []
    assert plan(waiting=[candidate(0, 64)], free_blocks=3, suspended=3).admitted == []
    assert len(plan(waiting=[candidate(0, 64)], free_blocks=4, suspended=3).admitted) == 1


@given(situations())
def test_a_step_keeps_within_its_blocks_and_tokens(situation: Situation) -> None:
    decoding, prompts, waiting, free = situation
    step = plan(decoding, prompts, waiting, free)
    freed = sum(len(request.progress.block_ids) for request in step.preempted)
    taken = sum(admitted.free_blocks_taken for admitted in step.admitted)
    assert len(step.growing) + taken <= free + freed
    assert len(step.decoding) + sum(chunk.tokens for chunk in step.chunks) <= LIMITS.max_step_tokens
    assert all(chunk.tokens > 0 for chunk in step.chunks)


@given(situations())
def test_the_earliest_running_request_always_advances(situation: Situation) -> None:
    decoding, prompts, waiting, free = situation
    step = plan(decoding, prompts, waiting, free)
    everyone = sorted([*decoding, *prompts], key=lambda request: request.arrival)
    advancing = [*step.decoding, *(chunk.request for chunk in step.chunks)]
    assert not everyone or everyone[0] not in step.preempted
    assert all(request in advancing for request in decoding if request not in step.preempted)
    surviving = [request for request in everyone if request in prompts and request not in step.preempted]
    assert not surviving or surviving[0] in advancing


@given(situations())
def test_something_runs_whenever_something_waits(situation: Situation) -> None:
    decoding, prompts, waiting, free = situation
    step = plan(decoding, prompts, waiting, free)
    assert step.decoding or step.chunks or not (decoding or prompts or waiting)


def test_a_chunk_that_ranks_divide_may_be_larger() -> None:
    limits = PromptLimits(divided_tokens=100, most_tokens=120, most_alone=30)
    decoding = [running(0, 11, 10, [0])]
    divided = plan(decoding, [running(1, 500, 0, range(1, 9))], prompt_limits=limits)
    assert chunks_of(divided) == [(1, 100)]
    # The rest of such a prompt, and shorter prompts, are computed alone.
    rest, short = running(1, 500, 440, range(1, 9)), running(2, 50, 0, [9])
    assert chunks_of(plan(decoding, [rest], prompt_limits=limits)) == [(1, 30)]
    assert chunks_of(plan(decoding, [short], [candidate(3, 20)], prompt_limits=limits)) == [(2, 30)]
    # Without requests that decode nothing is bounded.
    assert chunks_of(plan([], [rest], prompt_limits=limits)) == [(1, 60)]


@pytest.mark.parametrize(
    ("left", "chunk"),
    [(500, 100), (480, 120), (361, 120), (300, 100), (230, 115), (199, 100), (195, 120), (120, 120), (110, 110)],
)
def test_a_prompt_is_divided_into_equal_chunks(left: int, chunk: int) -> None:
    """None of them is a rest that ranks would not divide, unless the bound leaves no choice."""
    limits = PromptLimits(divided_tokens=100, most_tokens=120)
    step = plan([running(0, 11, 10, [0])], [running(1, left, 0, range(1, 9))], prompt_limits=limits)
    assert chunks_of(step) == [(1, chunk)]


def test_long_prompts_wait_for_their_turn_short_ones_never() -> None:
    limits = PromptLimits(divided_tokens=100, most_tokens=120, most_alone=30, long_tokens=200, turn=False)
    decoding, long = [running(0, 11, 10, [0])], running(1, 500, 440, range(1, 9))
    assert chunks_of(plan(decoding, [long, running(2, 50, 40, [9])], prompt_limits=limits)) == [(2, 10)]
    assert chunks_of(plan([], [long], prompt_limits=limits)) == [(1, 60)]


def test_a_step_divides_one_long_prompt() -> None:
    limits, room = PromptLimits(divided_tokens=100, long_tokens=200), Limits(max_step_tokens=1000, max_requests=8)
    decoding, blocks = [running(0, 11, 10, [0])], range(1, 9)
    first, rest, second, short = (
        running(*each, blocks) for each in ((1, 250, 0), (1, 250, 240), (2, 300, 0), (3, 150, 0))
    )

    def chunks(decoding: list[Request], *prompts: Request) -> list[tuple[int, int]]:
        return chunks_of(plan(decoding, list(prompts), limits=room, prompt_limits=limits))

    assert chunks(decoding, first, second, short) == [(1, 250), (3, 150)]
    assert chunks(decoding, rest, second) == [(1, 10), (2, 300)]
    assert chunks([], first, second) == [(1, 250), (2, 300)]
