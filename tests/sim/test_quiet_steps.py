"""Steps that are taken together leave everything as it is when each is taken by itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.cost_file import CostFile, save_costs
from mesh.costs import CostModel
from sim.gateway import Live
from sim.quiet_steps import QuietSteps
from sim.result import Result
from tests.support.simulation import make_fleet, make_workload, ran

FAULTS = [
    {"kind": "die", "role": "decode", "at": 3},
    {"kind": "freeze", "role": "decode", "at": 5, "seconds": 1},
    {"kind": "slow_steps", "role": "decode", "at": 2.01, "seconds": 3},
    {"kind": "upgrade", "role": "decode", "at": 6},
]
LONG = {"mean": 150, "kind": "exponential"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode workers alone": ({"decode": {"replicas": 2}}, {"output": LONG}),
    "pairs and a store": (
        {"prefill": {"replicas": 1}, "decode": {"replicas": 2}, "stores": {"replicas": 1}},
        {"output": LONG, "prefixes": 4, "prefix_tokens": 128},
    ),
    "bounded steps": (
        {"decode": {"replicas": 2, "mixed_step_ms": 40}},
        {"output": LONG, "prompt": {"mean": 2000}, "per_second": 1.0},
    ),
    "faults": ({"prefill": {"replicas": 1}, "decode": {"replicas": 3}, "faults": FAULTS}, {"output": LONG}),
    "preemptions, turns and tenants": (
        {"decode": {"replicas": 2, "total_blocks": 60, "max_requests": 8}},
        {"output": LONG, "turns": 2, "think_seconds": 1, "tenants": [{"name": "a"}, {"name": "b", "weight": 2}]},
    ),
}


def outcome(fleet: dict[str, Any], workload: dict[str, Any]) -> tuple[int, Result, list[tuple[object, ...]]]:
    """Events, and what came of the fleet and of each request, to the last bit."""
    mesh, result = ran(make_fleet(**fleet), make_workload(**workload))
    lives = [_of(live) for live in sorted(mesh.ended, key=lambda live: live.number)]
    return result.events, replace(result, events=0), lives


def _of(live: Live) -> tuple[object, ...]:
    return (
        live.record,
        live.decode_id,
        live.cached_tokens,
        live.predicted_ttft_ms,
        live.predicted_tpot_ms,
        live.retries.attempts,
    )


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuietSteps, "ahead", lambda steps: 0)


@pytest.mark.parametrize("name", CASES)
def test_steps_taken_together_are_those_taken_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, workload = CASES[name]
    workload = {"per_second": 5.0, "seconds": 8, **workload}
    events, *together = outcome(fleet, workload)
    one_by_one(monkeypatch)
    more_events, *alone = outcome(fleet, workload)
    assert together == alone
    assert events < more_events


def test_steps_are_equal_while_messages_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_costs(CostFile(CostModel(request_ms=9.0)), tmp_path / "costs.json")
    fleet, workload = CASES["faults"]
    fleet, workload = {**fleet, "costs": tmp_path / "costs.json"}, {"per_second": 5.0, "seconds": 8, **workload}
    _, *together = outcome(fleet, workload)
    one_by_one(monkeypatch)
    _, *alone = outcome(fleet, workload)
    assert together == alone


@given(
    st.integers(0, 1000),
    st.integers(20, 300),
    st.integers(1, 3),
    st.floats(0.01, 0.5),
    st.lists(st.sampled_from(FAULTS), max_size=2),
)
@example(941, 41, 1, 0.5, [FAULTS[2]])
@settings(max_examples=8, deadline=None)
def test_steps_are_equal_with_any_pool_and_reports(
    seed: int, blocks: int, replicas: int, interval: float, faults: list[dict[str, Any]]
) -> None:
    decode = {"replicas": replicas, "total_blocks": blocks, "status_interval_seconds": interval, "max_requests": 6}
    fleet: dict[str, Any] = {"decode": decode, "faults": faults}
    workload = {
        "per_second": 4.0,
        "seconds": 5,
        "output": {"mean": 80, "kind": "exponential", "most": 500},
        "seed": seed,
    }
    _, *together = outcome(fleet, workload)
    with pytest.MonkeyPatch.context() as monkeypatch:
        one_by_one(monkeypatch)
        _, *alone = outcome(fleet, workload)
    assert together == alone
