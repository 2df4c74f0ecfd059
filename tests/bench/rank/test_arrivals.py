"""Requests that arrive at a rank, measured on the oracle."""

import time
from typing import Any

import pytest

from bench.meshes.http_peers import Lengths
from bench.rank.arrivals import Arrived, arrive, saturation, steps_table, table_of
from engine.oracle.backend import OracleBackend
from engine.pace.mixed_steps import EVEN, FEWEST_CAPTURED
from tests.support.engines import oracle_config
from tests.support.sleeping_clock import SleepingClock

STEP_MS, TOKEN_MS = 10.0, 0.005
LENGTHS = Lengths(7000, 40)


@pytest.fixture(name="clock")
def clock_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> SleepingClock:
    clock = SleepingClock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def arrived(clock: SleepingClock, mixed_step_ms: Any) -> Arrived:
    oracle = {"step_ms": STEP_MS, "prefill_tokens_per_second": 1000 / TOKEN_MS}
    config = oracle_config(
        max_requests=16, max_step_tokens=16384, total_blocks=2000, oracle=oracle, mixed_step_ms=mixed_step_ms
    )
    backend = OracleBackend(config, clock, clock.sleep)
    backend.captured_prompt_tokens = FEWEST_CAPTURED
    return arrive(config, backend, LENGTHS, 4.0, 10.0, 2.0)


def test_even_steps_of_arriving_requests_are_seen(clock: SleepingClock) -> None:
    whole, even = arrived(clock, None), arrived(clock, "auto")
    assert [each.came_at for each in whole.answered] == [each.came_at for each in even.answered]
    assert all(len(each.token_times) == LENGTHS.answer and each.came_at >= 2.0 for each in even.answered)
    assert (whole.gaps_ms(50), even.gaps_ms(50)) == pytest.approx((STEP_MS, STEP_MS), rel=0.01)
    assert whole.gaps_ms(99) > 40
    assert even.gaps_ms(99) == pytest.approx(EVEN * STEP_MS, rel=0.15)
    assert even.first_ms(50) > whole.first_ms(50) > LENGTHS.prompt * TOKEN_MS
    assert table_of([whole, even], "").row_count == 2
    kinds = [list(steps_table(each).columns[0].cells) for each in (whole, even)]
    assert "to 7,168" in kinds[0] and "to 2,560" in kinds[1]


def test_a_full_rank_ends_as_many_requests_as_it_can(clock: SleepingClock) -> None:
    oracle = {"step_ms": STEP_MS, "prefill_tokens_per_second": 1000 / TOKEN_MS}
    config = oracle_config(max_requests=4, max_step_tokens=16384, total_blocks=2000, oracle=oracle)
    rate = saturation(config, OracleBackend(config, clock, clock.sleep), LENGTHS, 2.0, 20.0)
    # Each takes 100 ms of everyone's time for its prompt, and 40 steps that it shares with three others.
    assert rate == pytest.approx(1000 / (LENGTHS.prompt * TOKEN_MS + LENGTHS.answer * STEP_MS / 4), rel=0.15)
