import pytest

from bench.gateway_relay.__main__ import judge
from bench.gateway_relay.measurements import Saturation, StepLatency
from loadgen.summary import Distribution


def saturated(subject: str, *rates: float) -> list[Saturation]:
    return [Saturation(subject, rate, rate / 2, {"source": 1.0, "relay": 1.0, "gateway": 0.5}) for rate in rates]


def late(*p99s_ms: float) -> list[StepLatency]:
    return [StepLatency(1, Distribution(mean=0, p50=0, p90=0, p99=p99, max=p99), {}) for p99 in p99s_ms]


def test_the_verdict_compares_medians_less_what_the_direct_path_takes() -> None:
    verdict = judge(
        {
            "direct": saturated("source", 900),
            "relay": saturated("relay", 50, 100, 999),
            "gateway": saturated("gateway", 1, 80, 90),
        },
        {"direct": late(1.0, 2.0, 9.0), "relay": late(5.0, 4.0, 99.0), "gateway": late(6.5, 6.5, 0.0)},
    )
    assert (verdict.throughput_ratio, verdict.message_ratio) == (0.8, 0.8)
    assert verdict.per_core_ratio == pytest.approx(1.6)
    assert (verdict.relay_added_ms, verdict.gateway_added_ms) == (3.0, 4.5)
    assert verdict.added_ratio == pytest.approx(1.5)
    assert verdict.latency_ratio == 1.3


def test_a_relay_that_adds_nothing_is_no_measure() -> None:
    same = {"relay": saturated("relay", 1), "gateway": saturated("gateway", 1)}
    assert judge(same, {"direct": late(3.0), "relay": late(2.0), "gateway": late(4.0)}).added_ratio is None
