"""A fleet that follows its load: the day and the spike of docs/scaling.md. `make check-simulator`."""

import itertools
from pathlib import Path

import pytest

from mesh.domain.workers import WorkerRole
from sim.asked import SyntheticWorkload
from sim.result import result_of
from sim.run import check_conserved, read_fleet, read_objectives, read_workload
from sim.simulation import SimulatedMesh

SCENARIO = Path(__file__).parents[2] / "docs/scaling"


@pytest.mark.check("simulator")
def test_the_fleet_follows_a_day_and_a_spike_without_oscillation() -> None:
    fleet, workload = read_fleet(SCENARIO / "fleet.yaml"), read_workload(SCENARIO / "workload.yaml")
    mesh = SimulatedMesh(fleet, workload.seed)
    mesh.run(SyntheticWorkload(workload))
    check_conserved(mesh)
    changes = mesh.lifecycle.replicas[WorkerRole.DECODE]
    noon = max(count for time, count in changes if time < 190)
    spike = max(count for time, count in changes if 200 <= time < 260)
    assert 4 <= noon < spike
    assert changes[-1][1] <= noon / 2
    # Up in the morning, up in the spike, and down after each.
    counts = [count for _, count in changes]
    steps = [after - before for before, after in itertools.pairwise(counts) if after != before]
    turns = sum((first > 0) != (second > 0) for first, second in itertools.pairwise(steps))
    assert turns <= 3
    result = result_of(mesh, read_objectives("ttft=5s,tpot=50ms"), workload.warm_up_seconds)
    assert result.summary.goodput.share > 0.9
