import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.workers import WorkerRole
from sim.fleet import FleetConfig
from tests.support.simulation import make_fleet, make_workload, ran

PAIRS = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}


def test_a_lone_request_takes_what_its_cost_model_says() -> None:
    workload = make_workload(arrivals={"kind": "steady", "per_second": 0.1}, seconds=11, output={"mean": 11})
    _, result = ran(make_fleet(), workload)
    assert result.summary.ttft_ms is not None and result.summary.tpot_ms is not None
    # 300 tokens at 5,000 a second, then ten steps of 20 ms.
    assert result.summary.ttft_ms.p50 == pytest.approx(60.0)
    assert result.summary.tpot_ms.p50 == pytest.approx(20.0)


def test_a_pushed_prompt_takes_the_calls_and_the_push_too() -> None:
    fleet = make_fleet(**PAIRS, scheduler={"placement": {"short_prompt_tokens": 0}})
    workload = make_workload(
        arrivals={"kind": "steady", "per_second": 0.1}, seconds=11, output={"mean": 11}, prompt={"mean": 640}
    )
    mesh, result = ran(fleet, workload)
    assert mesh.ended[0].prefill_id is not None
    record = result.summary
    assert record.latency_ms is not None
    # The first token overtakes the KV: prompt, calls, 10 blocks of 4.5 MB at 2 GB/s, ten steps.
    assert record.latency_ms.p50 == pytest.approx(128 + 5 + 22.5 + 10 * 20, abs=1.0)


def test_prompts_that_share_a_prefix_are_computed_once() -> None:
    workload = make_workload(prefixes=1, prefix_tokens=256)
    _, result = ran(make_fleet(), workload)
    assert result.cache.worker == 256 * (result.summary.requests - 1)


def test_a_turn_finds_what_was_said_before() -> None:
    workload = make_workload(0.2, turns=2, think_seconds=1.0, prompt={"mean": 640}, output={"mean": 64})
    mesh, _ = ran(make_fleet(), workload)
    first, second = mesh.ended[:2]
    assert second.record.prompt_tokens == (first.record.prompt_tokens or 0) + 64 + 640
    # All full blocks of the first turn but the one that its last token, never computed, belongs to.
    assert second.cached_tokens == 640


def test_a_store_keeps_what_workers_forget() -> None:
    fleet = make_fleet(
        decode={"replicas": 1, "total_blocks": 40, "max_requests": 2}, stores={"replicas": 1, "total_blocks": 10_000}
    )
    _, result = ran(fleet, make_workload(1.0, prefixes=8, prefix_tokens=512, prompt={"mean": 600}, seconds=60))
    assert result.cache.store > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_memory_keeps_what_pools_forget(ranks: int) -> None:
    decode = {"replicas": 1, "total_blocks": 40, "max_requests": 2, "ranks": ranks}
    sessions = make_workload(0.3, turns=4, think_seconds=5.0, prompt={"mean": 200}, output={"mean": 64}, seconds=60)
    _, without = ran(make_fleet(decode=decode), sessions)
    _, result = ran(make_fleet(decode={**decode, "host_blocks": 1000}), sessions)
    assert without.cache.host == 0 and result.cache.host > 0
    assert result.cache.computed < without.cache.computed


def test_a_read_from_host_memory_takes_what_its_rate_says() -> None:
    decode = {"replicas": 1, "total_blocks": 12, "host_blocks": 100}
    # The two prompts take turns in a pool that has room for one. A block of 4.5 MB takes 0.9 ms.
    workload = make_workload(0.1, prefixes=2, prefix_tokens=576, prompt={"mean": 640}, output={"mean": 2}, seconds=100)
    mesh, result = ran(make_fleet(decode=decode), workload)
    costs = mesh._costs[WorkerRole.DECODE]
    hits = [live for live in mesh.ended if live.host_cached_tokens]
    assert result.cache.host and hits
    for live in hits:
        read_ms = live.host_cached_tokens / 64 * 4_500_000 / costs.host_read_bytes_per_second * 1000
        computed_ms = costs.prefill_ms(640 - live.cached_tokens, live.cached_tokens)
        assert live.record.ttft_s == pytest.approx((read_ms + computed_ms) / 1000, rel=0.01)


def test_tenants_share_no_prefix() -> None:
    tenants = [{"name": "a"}, {"name": "b"}]
    _, alone = ran(make_fleet(), make_workload(prefixes=1, prefix_tokens=256))
    _, apart = ran(make_fleet(), make_workload(prefixes=1, prefix_tokens=256, tenants=tenants))
    assert apart.cache.worker == alone.cache.worker - 256


FAULTS = [
    {"kind": "die", "role": "prefill", "at": 2},
    {"kind": "die", "role": "decode", "at": 3},
    {"kind": "freeze", "role": "decode", "at": 4, "seconds": 2},
    {"kind": "freeze", "role": "prefill", "at": 5, "seconds": 30},
    {"kind": "slow_link", "role": "prefill", "at": 1, "seconds": 4},
    {"kind": "slow_steps", "role": "decode", "at": 1, "seconds": 4},
    {"kind": "upgrade", "role": "decode", "at": 5.5},
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault['kind']}-{fault['role']}")
def test_a_fault_of_one_worker_loses_no_request(fault: dict[str, Any]) -> None:
    fleet = make_fleet(
        prefill={"replicas": 2}, decode={"replicas": 3}, stores={"replicas": 1}, faults=[fault], costs=None
    )
    mesh, result = ran(fleet, make_workload(10.0, seconds=10, output={"mean": 40, "kind": "exponential"}))
    assert mesh.faults.happened == 1
    assert result.summary.completed == result.summary.requests


@given(st.data())
@settings(max_examples=settings().max_examples // 12)
def test_whatever_happens_every_request_ends_once_and_every_block_returns(data: st.DataObject) -> None:
    faults = data.draw(st.lists(st.sampled_from(FAULTS), max_size=4))
    fleet = make_fleet(
        prefill={"replicas": data.draw(st.integers(0, 2)), "total_blocks": 200},
        decode={
            "replicas": data.draw(st.integers(1, 3)),
            "total_blocks": data.draw(st.sampled_from([40, 200])),
            "host_blocks": data.draw(st.sampled_from([0, 20, 1000])),
            "max_requests": 4,
        },
        stores={"replicas": data.draw(st.integers(0, 1)), "total_blocks": 300},
        autoscale=data.draw(st.booleans()),
        faults=faults,
    )
    workload = make_workload(
        data.draw(st.floats(0.5, 30)),
        seconds=6,
        seed=data.draw(st.integers(0, 99)),
        prefixes=3,
        prefix_tokens=128,
        turns=data.draw(st.integers(1, 2)),
        think_seconds=1,
        max_tokens=data.draw(st.sampled_from([None, 500])),
    )
    # It raises if a request or a block was lost.
    ran(fleet, workload)


PROGRAM = """
from tests.support.simulation import make_fleet, make_workload, ran
from sim.report import save
from sim.sweep import Point
from pathlib import Path
import sys
fleet = make_fleet(prefill={"replicas": 1}, decode={"replicas": 2}, stores={"replicas": 1},
    faults=[{"kind": "die", "role": "decode", "per_hour": 100}])
_, result = ran(fleet, make_workload(prefixes=4, prefix_tokens=128, output={"mean": 30, "kind": "lognormal"}))
save([Point((), result)], Path(sys.argv[1]))
"""


def test_equal_seeds_give_equal_bytes_in_any_process(tmp_path: Any) -> None:
    processes = []
    for name, hash_seed in (("a", "1"), ("b", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        processes.append(subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / name)], env=environment))
    assert [process.wait(100) for process in processes] == [0, 0]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_seed_gives_another_course() -> None:
    first, second = (ran(make_fleet(), make_workload(seed=seed))[1] for seed in (1, 2))
    assert first.events != second.events


@pytest.mark.check("simulator")
def test_the_fleet_grows_with_its_load_and_shrinks_after_it() -> None:
    scaling = {"scale_in_seconds": 20, "period_seconds": 1}
    fleet = FleetConfig.model_validate(
        {
            "decode": {"replicas": 1, "max_requests": 4},
            "autoscale": True,
            "scheduler": {"scaling": scaling, "placement": {"queue_requests": 64}},
        }
    )
    arrivals = {"per_second": 8.0, "day_seconds": 240.0, "night": 0.02}
    mesh, _ = ran(fleet, make_workload(arrivals=arrivals, seconds=240, output={"mean": 40}))
    counts = [count for _, count in mesh.lifecycle.replicas[WorkerRole.DECODE]]
    assert max(counts) >= 3
    assert counts[-1] < max(counts)
