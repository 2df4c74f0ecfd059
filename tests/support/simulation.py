"""Small fleets and workloads for tests of the simulator."""

from typing import Any

from loadgen.summary import Objectives
from mesh.config_values import validate
from sim.asked import SyntheticWorkload
from sim.fleet import FleetConfig
from sim.result import Result, result_of
from sim.run import check_conserved
from sim.simulation import SimulatedMesh
from sim.workload import WorkloadConfig

NO_OBJECTIVES = Objectives(None, None)


def make_fleet(**values: Any) -> FleetConfig:
    return validate(FleetConfig, values, "fleet")


def make_workload(per_second: float = 4.0, **values: Any) -> WorkloadConfig:
    defaults = {"seconds": 20, "arrivals": {"per_second": per_second}, "prompt": {"mean": 300}, "output": {"mean": 20}}
    return validate(WorkloadConfig, {**defaults, **values}, "workload")


def ran(fleet: FleetConfig, workload: WorkloadConfig) -> tuple[SimulatedMesh, Result]:
    """Simulate the workload; asserts that no request or block was lost."""
    mesh = SimulatedMesh(fleet, workload.seed)
    mesh.run(SyntheticWorkload(workload))
    check_conserved(mesh)
    return mesh, result_of(mesh, NO_OBJECTIVES, workload.warm_up_seconds)
