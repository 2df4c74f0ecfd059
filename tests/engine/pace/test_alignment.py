from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.oracle.backend import OracleBackend
from engine.oracle.tokens import oracle_tokens
from engine.pace.alignment import Alignment
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.step.shape import StepShape
from tests.support.engines import (
    VOCABULARY,
    Transcript,
    assert_at_rest,
    oracle_config,
    oracle_engine,
    prompt_of,
    submit_of,
)
from tests.support.rank_threads import on_each_rank

RANKS, MOST_STEPS = 4, 3


def shape(waiting_prompts: int = 0, decodes: bool = True, prefills: bool = False, beginning: int = 0) -> StepShape:
    return StepShape(8, waiting_prompts=waiting_prompts, decodes=decodes, prefills=prefills, beginning=beginning)


def opens(*shapes: StepShape, most_steps: int = MOST_STEPS, ranks: int = RANKS) -> list[bool]:
    """Whether prompts may begin after each of these steps."""
    alignment, opened = Alignment(ranks, most_steps), []
    for each in shapes:
        alignment = alignment.after(each)
        opened.append(alignment.opens)
    return opened


def test_prompts_begin_once_every_rank_has_one() -> None:
    assert opens(shape(), shape(1), shape(3), shape(4)) == [False, False, False, True]


def test_a_prompt_waits_no_longer_than_it_was_told() -> None:
    assert opens(shape(1), shape(1), shape(2), shape(1)) == [False, False, True, False]


def test_a_prompt_after_a_long_pause_does_not_wait() -> None:
    pause = [shape() for _ in range(MOST_STEPS)]
    assert opens(shape(prefills=True), *pause) == [True, False, False, True]
    # As soon as prompts come again, the next one waits.
    assert opens(*pause, shape(beginning=1), shape(), shape(1)) == [False, False, True, False, False, False]


def test_no_prompt_waits_if_no_rank_decodes() -> None:
    assert opens(shape(1, decodes=False), shape(0, decodes=False)) == [True, True]


def test_prompts_join_one_that_is_under_way() -> None:
    assert opens(shape(1, prefills=True), shape(0, prefills=True), shape(1)) == [True, True, False]


def test_prompts_of_one_rank_or_with_zero_steps_never_wait() -> None:
    assert opens(shape(1), ranks=1) == opens(shape(1), most_steps=0) == [True]


@given(st.lists(st.builds(shape, st.integers(1, RANKS), st.booleans(), st.booleans()), min_size=MOST_STEPS))
def test_no_prompt_waits_for_more_than_the_bound(shapes: list[StepShape]) -> None:
    opened = opens(*shapes)
    assert all(any(opened[start : start + MOST_STEPS]) for start in range(len(opened) - MOST_STEPS + 1))


def steps_until_begun(wait_steps: int, comes: int, divided_tokens: int | None, peers: Peers) -> int | None:
    """The first rank decodes, and the second gets a prompt in step `comes`. Returns after how many steps it begins."""
    parallel = ParallelConfig(dp=2, prompt_wait_steps=wait_steps, context_parallel_tokens=divided_tokens)
    config = oracle_config(total_blocks=64, parallel=parallel)
    engine = Engine(config, OracleBackend(config), lambda: 0.0, agreement=peers.steps)
    transcript = Transcript()
    if peers.place.rank == 0:
        engine.submit(submit_of(0, prompt_of(30), 40))
    begun = None
    for step in range(45):
        if step == comes and peers.place.rank == 1:
            engine.submit(submit_of(1, prompt_of(100), 5))
        transcript.record(engine.step())
        if begun is None and 1 in transcript.token_ids:
            begun = step - comes
    for key in transcript.ends:
        length = len(transcript.token_ids[key])
        assert transcript.token_ids[key] == oracle_tokens(prompt_of([30, 100][key]), length, VOCABULARY)
    assert_at_rest(engine)
    return begun


@pytest.mark.parametrize(("wait_steps", "comes", "waits"), [(0, 10, 0), (5, 3, 5), (20, 10, 20), (5, 10, 0)])
def test_a_prompt_on_one_rank_waits_while_another_decodes(wait_steps: int, comes: int, waits: int) -> None:
    """It does not wait if the prompt before came so long ago that no other one is to be expected."""
    # The other rank learns of the prompt in the step in which it arrives.
    assert on_each_rank(Layout(dp=2), partial(steps_until_begun, wait_steps, comes, None)) == [None, waits]


@pytest.mark.parametrize(("divided_tokens", "waits"), [(100, 0), (101, 20)])
def test_a_prompt_that_all_ranks_compute_waits_for_none(divided_tokens: int, waits: int) -> None:
    assert on_each_rank(Layout(dp=2), partial(steps_until_begun, 20, 10, divided_tokens)) == [None, waits]


def steps_until_next_turn(peers: Peers) -> int | None:
    """As `steps_until_begun`, for a prompt whose first block is cached and that follows other prompts on its rank."""
    config = oracle_config(total_blocks=64, parallel=ParallelConfig(dp=2, prompt_wait_steps=20))
    engine = Engine(config, OracleBackend(config), lambda: 0.0, agreement=peers.steps)
    transcript = Transcript()
    engine.submit(submit_of(0, prompt_of(100), 40 if peers.place.rank == 0 else 1))
    begun = None
    for step in range(45):
        if step == 5 and peers.place.rank == 1:
            engine.submit(submit_of(1, prompt_of(100) + prompt_of(30, seed=1), 5))
        transcript.record(engine.step())
        if begun is None and 1 in transcript.token_ids:
            begun = step - 5
    assert_at_rest(engine)
    return begun


def test_few_tokens_after_cached_blocks_wait_for_no_other_prompt() -> None:
    assert on_each_rank(Layout(dp=2), steps_until_next_turn) == [None, 0]


def test_a_prompt_begins_at_once_if_no_request_decodes() -> None:
    engine = oracle_engine(total_blocks=64, parallel=ParallelConfig(dp=2, prompt_wait_steps=1000))
    transcript = Transcript()
    for key in range(2):
        engine.submit(submit_of(key, prompt_of(100), 5))
        transcript.run(engine)
    assert_at_rest(engine)
