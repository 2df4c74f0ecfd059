"""A long prompt and requests that decode, measured on the oracle."""

import time
from pathlib import Path

import pytest

from bench.rank.mixed import Mixed, measure_mixed, plot, table_of, tokens_per_second_alone
from engine.oracle.backend import OracleBackend
from tests.support.engines import DeferredOracle, oracle_config
from tests.support.sleeping_clock import SleepingClock

STEP_MS, TOKEN_MS = 10.0, 0.1


@pytest.fixture(name="clock")
def clock_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> SleepingClock:
    clock = SleepingClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def measured(clock: SleepingClock, *bounds: dict[str, object]) -> tuple[float, list[Mixed]]:
    """How fast the prompt is alone, and with requests, by what it may take."""
    oracle = {"step_ms": STEP_MS, "prefill_tokens_per_second": 1000 / TOKEN_MS}
    config = oracle_config(max_requests=5, max_step_tokens=2048, total_blocks=700, oracle=oracle)
    backend = OracleBackend(config, clock, clock.sleep)
    alone = tokens_per_second_alone(config, backend, 20_000, 4096)
    return alone, [measure_mixed(config.model_copy(update=bound), backend, 4, 20_000) for bound in bounds]


def test_the_longer_steps_may_take_the_faster_is_the_prompt(clock: SleepingClock) -> None:
    alone, (short, long) = measured(clock, {"mixed_step_ms": 15.0}, {"mixed_step_ms": 20.0})
    assert 0 < short.prompt_tokens_per_second < long.prompt_tokens_per_second < 1.1 * alone
    # A token takes 0.1 ms besides the 10 of a step: 50 of them in 15 ms, and 100 in 20.
    assert (short.quiet_ms, short.tpot_ms, long.tpot_ms) == pytest.approx((10.0, 15.0, 20.0), rel=0.02)
    assert (short.longest_ms, long.longest_ms) == pytest.approx((15.0, 20.0), rel=0.05)
    rates = short.prompt_tokens_per_second, long.prompt_tokens_per_second
    assert rates == pytest.approx((50 / 0.015, 100 / 0.02), rel=0.03)


def test_a_prompt_gets_its_share_of_the_time(clock: SleepingClock, tmp_path: Path) -> None:
    bounds: list[dict[str, object]] = [{"prompt_share": share, "max_step_tokens": 1024} for share in (0.2, 0.5)]
    alone, (small, large) = measured(clock, *bounds)
    assert (small.tpot_ms, large.tpot_ms) == pytest.approx((STEP_MS / 0.8, STEP_MS / 0.5), rel=0.1)
    rates = small.prompt_tokens_per_second, large.prompt_tokens_per_second
    assert rates == pytest.approx((200 / TOKEN_MS, 500 / TOKEN_MS), rel=0.1)
    assert large.longest_ms == pytest.approx(STEP_MS + 1020 * TOKEN_MS, rel=0.01)
    assert table_of([small, large], alone, "").row_count == 2
    plot([small, large], alone, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_prompts_rate_counts_only_collected_steps(clock: SleepingClock) -> None:
    oracle = {"step_ms": STEP_MS, "prefill_tokens_per_second": 1000 / TOKEN_MS}
    config = oracle_config(max_requests=5, max_step_tokens=2048, total_blocks=700, overlap="on", oracle=oracle)
    alone = tokens_per_second_alone(config, DeferredOracle(config, clock, clock.sleep), 20_000, 4096)
    assert alone == pytest.approx(1000 / TOKEN_MS, rel=0.1)
