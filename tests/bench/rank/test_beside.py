"""A long prompt beside requests that decode, measured on the oracle."""

import time

import pytest

from bench.rank.beside import measure_beside, table_of, tokens_per_second_alone
from engine.oracle import OracleBackend
from tests.support.engines import oracle_config
from tests.support.sleeping_clock import SleepingClock


def test_the_longer_steps_may_take_the_faster_is_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleepingClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    oracle = {"step_ms": 10.0, "prefill_tokens_per_second": 10_000.0}
    config = oracle_config(max_requests=5, max_step_tokens=2048, total_blocks=500, oracle=oracle)
    backend = OracleBackend(config, clock, clock.sleep)
    alone = tokens_per_second_alone(config, backend, 16_000, 4096)
    short, long = (
        measure_beside(config.model_copy(update={"mixed_step_ms": ms}), backend, 4, 16_000) for ms in (15.0, 20.0)
    )
    assert 0 < short.prompt_tokens_per_second < long.prompt_tokens_per_second < 1.1 * alone
    assert 1.0 <= short.quiet_ms < short.tpot_ms < long.tpot_ms
    # A token takes 0.1 ms beside the 10 of a step: 50 of them in 15 ms, and 100 in 20.
    assert (short.quiet_ms, short.tpot_ms, long.tpot_ms) == pytest.approx((10.0, 15.0, 20.0), rel=0.02)
    rates = short.prompt_tokens_per_second, long.prompt_tokens_per_second
    assert rates == pytest.approx((50 / 0.015, 100 / 0.02), rel=0.03)
    assert table_of([short, long], alone, "").row_count == 2
