"""In how many steps a rank computes its prompts, and what they cost where a step takes time besides its tokens."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.costs import CostModel
from mesh.domain.workers import PromptPace, RankStatus, TransferCounters
from scheduler.placement.candidates import Candidates, CandidateWorker, Pace, Unreported
from scheduler.placement.placed_work import PlacedWork
from scheduler.placement.predict import predict
from scheduler.placement.prompts import LastStep
from scheduler.placement.times import source
from tests.support.scheduling import make_candidate, make_constants, make_load, make_rank, make_request, predict_alone

RATE, STEP_MS, STEP_TOKENS = 10_000.0, 30.0, 1000
COSTS = CostModel(decode_steps=((1.0, 20.0),), prefill_tokens_per_second=RATE, prefill_step_ms=STEP_MS)
CONSTANTS = make_constants(COSTS)
PACE = Pace(1.0, 1.0, 1.0, 1e9, 1e9, 1e9)


def pace_in_steps_of(tokens: float, slowness: float = 1.0) -> PromptPace:
    """What a rank measures that computes prompts in such steps, `slowness` times slower than the cost model."""
    return PromptPace(1000 / (1000 / RATE + STEP_MS / tokens) / slowness, 0.0, tokens)


def idle(pace: PromptPace | None = None, **changes: object) -> CandidateWorker:
    load = make_load(exact_prompts=pace, prefill_tokens_per_second=None)
    return make_candidate("d", load=load, max_step_tokens=STEP_TOKENS, **changes)


def first_token_ms(worker: CandidateWorker, prompt_tokens: int) -> float:
    (terms,) = predict_alone(make_request(prompt_tokens=prompt_tokens), [worker], CONSTANTS)
    return terms.ttft_ms


@pytest.mark.parametrize(("tokens", "steps"), [(100, 1), (1000, 1), (1001, 2), (3000, 3)])
def test_a_prompt_takes_its_tokens_and_their_steps(tokens: int, steps: int) -> None:
    assert first_token_ms(idle(), tokens) == pytest.approx(tokens * 1000 / RATE + steps * STEP_MS)


@pytest.mark.parametrize("measured_in", [50.0, 1000.0])
@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_short_and_long_prompts_are_foretold_whichever_were_measured(measured_in: float, slowness: float) -> None:
    worker = idle(pace_in_steps_of(measured_in, slowness))
    for tokens in (50, 1000):
        assert first_token_ms(worker, tokens) == pytest.approx(slowness * (tokens * 1000 / RATE + STEP_MS))


@pytest.mark.parametrize(("running", "even", "steps"), [(1, 300, 4), (1, None, 1), (0, 300, 1), (1, 2000, 1)])
def test_a_prompt_takes_even_steps_while_requests_decode(running: int, even: int | None, steps: int) -> None:
    load = make_load(running_requests=running, even_step_tokens=even, prefill_tokens_per_second=None)
    worker = make_candidate("d", load=load, max_step_tokens=STEP_TOKENS)
    found = source(make_request(prompt_tokens=1000), worker, PACE, None, 0.0, CONSTANTS)
    assert found.steps_ms == pytest.approx(steps * STEP_MS)


def test_a_rank_computes_its_queue_in_even_steps() -> None:
    rank = make_rank(step_tokens=STEP_TOKENS, costs=COSTS)
    pace = pace_in_steps_of(STEP_TOKENS)
    load = make_load(running_requests=1, queued_prefill_tokens=1000, even_step_tokens=250, exact_prompts=pace)
    rank.observe(RankStatus(load, TransferCounters(), 0), 1.0)
    assert rank.last_step.tokens == 250
    assert rank.prompts_until == pytest.approx(1.0 + (1000 * 1000 / RATE + 4 * STEP_MS) / 1000)


def test_a_worker_about_to_step_may_beat_an_idle_one() -> None:
    """The queue of 20 ms costs less than a step of one's own."""
    decode = idle(can_prefill=False)
    queued = idle(prompts_until=0.02, last_prompt_step=LastStep(begins_at=0.01, tokens=200))
    alone, shared = (
        predict(make_request(prompt_tokens=200), Candidates([decode], [prefill]), CONSTANTS)[0].ttft_ms
        for prefill in (idle(), queued)
    )
    assert alone - shared == pytest.approx(STEP_MS - 20.0)


@pytest.mark.parametrize(
    ("tokens", "comes_at", "most", "expected"),
    [
        pytest.param(400, 1.0, STEP_TOKENS, 0, id="it fits next to those that wait"),
        pytest.param(401, 1.0, STEP_TOKENS, 1, id="a part of it does not"),
        pytest.param(2400, 1.0, STEP_TOKENS, 2, id="it fills more steps"),
        pytest.param(400, 2.0, STEP_TOKENS, 1, id="the step has begun"),
    ],
)
def test_a_prompt_takes_further_steps(tokens: int, comes_at: float, most: int, expected: int) -> None:
    assert LastStep(begins_at=2.0, tokens=600).further_steps(tokens, comes_at, most) == expected


# More tokens than any list of prompts below has.
EVERYTHING = 1 << 20


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 900)), min_size=1, max_size=20))
def test_a_rank_is_free_when_it_has_computed_all_steps(prompts: list[tuple[int, int]]) -> None:
    """Each prompt arrives some ms after the one before it. A step computes all that is there when it begins."""
    rank, now, free_at, waiting = make_rank(0, COSTS, EVERYTHING), 0.0, 0.0, 0
    for number, (gap_ms, tokens) in enumerate(prompts):
        now += gap_ms / 1000
        while free_at <= now:
            load = make_load(queued_prefill_tokens=waiting, exact_prompts=pace_in_steps_of(500.0))
            rank.observe(RankStatus(load, TransferCounters(), 0), free_at)
            if not waiting:
                free_at = now
                break
            free_at, waiting = free_at + waiting / RATE + STEP_MS / 1000, 0
        steps = rank.last_step.further_steps(tokens, now, EVERYTHING)
        work = PlacedWork(Unreported(1, tokens, 1), tokens / RATE + steps * STEP_MS / 1000)
        rank.add_placement((str(number), 0), now, work)
        waiting += tokens
        assert steps == (waiting == tokens)
        assert rank.prompts_until == pytest.approx(free_at + waiting / RATE + STEP_MS / 1000)


@given(st.lists(st.integers(1, 3500), min_size=1, max_size=12))
def test_prompts_that_come_together_share_steps(prompts: list[int]) -> None:
    rank, seconds = make_rank(0, COSTS, STEP_TOKENS), 0.0
    for number, tokens in enumerate(prompts):
        steps = rank.last_step.further_steps(tokens, 0.0, STEP_TOKENS)
        prompt_seconds = tokens / RATE + steps * STEP_MS / 1000
        # They all wait for a step that begins in a second.
        rank.add_placement((str(number), 0), 0.0, PlacedWork(Unreported(1, tokens, 1), prompt_seconds), 1.0)
        seconds += prompt_seconds
    steps = ceil(sum(prompts) / STEP_TOKENS)
    assert seconds == pytest.approx(sum(prompts) / RATE + steps * STEP_MS / 1000)
    assert rank.last_step.tokens == sum(prompts) - (steps - 1) * STEP_TOKENS


def test_prompts_to_come_wait_for_the_step_after_next() -> None:
    rank = make_rank(0, COSTS, STEP_TOKENS)
    work = PlacedWork(Unreported(1, 300, 1), 300 / RATE + STEP_MS / 1000, comes_at=1.15)
    rank.add_placement(("r", 0), 1.0, work)
    load = make_load(queued_prefill_tokens=800, exact_prompts=pace_in_steps_of(500.0))
    rank.observe(RankStatus(load, TransferCounters(), 0), 1.1)
    begins_at = 1.1 + 800 / RATE + STEP_MS / 1000
    assert rank.last_step.begins_at == pytest.approx(begins_at)
    assert rank.prompts_until == pytest.approx(begins_at + work.prompt_seconds)
    assert [rank.last_step.further_steps(tokens, 1.2, STEP_TOKENS) for tokens in (700, 701)] == [0, 1]


def test_a_queue_of_several_steps_takes_the_time_of_each() -> None:
    rank = make_rank(0, COSTS, STEP_TOKENS)
    load = make_load(queued_prefill_tokens=2500, exact_prompts=pace_in_steps_of(250.0, slowness=2.0))
    rank.observe(RankStatus(load, TransferCounters(), 0), 1.0)
    assert rank.prompts_until == pytest.approx(1.0 + 2 * (2500 / RATE + 3 * STEP_MS / 1000))
    assert rank.last_step.tokens == 500
