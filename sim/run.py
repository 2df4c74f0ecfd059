"""One simulation from its files to its result."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadgen.summary import Objectives
from mesh.config_values import load
from mesh.errors import ConfigError
from sim.asked import Asked, SyntheticWorkload
from sim.fleet import FleetConfig, check_holds
from sim.result import Result, result_of
from sim.simulation import SimulatedMesh
from sim.tasks import LONGEST_PROMPT, TaskWorkload
from sim.traces import TraceWorkload
from sim.workload import LengthConfig, WorkloadConfig

Progress = Callable[[float], None]
# Arguments of gc.set_threshold: new objects between two collections of the youngest generation, and so on.
COLLECTIONS = (100_000, 50, 100)
UNITS = {"ms": 1.0, "s": 1000.0}


class SimulationBroken(AssertionError):
    """The simulation lost a request or a block: a mistake of ours, not of the fleet's."""


def read_fleet(path: Path, overrides: Sequence[str] = ()) -> FleetConfig:
    """Read a fleet. Paths of cost files in it are relative to its own file. Raises ConfigError."""
    fleet = load(FleetConfig, path, overrides)
    reports = {
        "costs": _beside(path, fleet.costs),
        "prefill": fleet.prefill.model_copy(update={"costs": _beside(path, fleet.prefill.costs)}),
        "decode": fleet.decode.model_copy(update={"costs": _beside(path, fleet.decode.costs)}),
    }
    return fleet.model_copy(update=reports)


def read_workload(path: Path, overrides: Sequence[str] = ()) -> WorkloadConfig:
    """Read a workload. The path of a trace in it is relative to its own file. Raises ConfigError."""
    workload = load(WorkloadConfig, path, overrides)
    return workload.model_copy(update={"trace": _beside(path, workload.trace)})


def read_objectives(text: str) -> Objectives:
    """Parse objectives such as "ttft=2s,tpot=50ms". Raises ConfigError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        unit = "ms" if value.endswith("ms") else "s"
        try:
            found[name] = float(value.removesuffix(unit)) * UNITS[unit]
        except ValueError:
            found[name] = 0.0
        if name not in ("ttft", "tpot") or not value.endswith(unit) or not found[name] > 0:
            raise ConfigError(f"--slo {text!r}: expected times such as ttft=2s,tpot=50ms")
    return Objectives(found.get("ttft"), found.get("tpot"))


def simulate(
    fleet: FleetConfig, workload: WorkloadConfig, objectives: Objectives, progress: Progress = lambda now: None
) -> Result:
    """Raises ConfigError, and SimulationBroken if a request or a block was lost."""
    asked: Iterable[Asked]
    if workload.trace is not None:
        asked = trace = TraceWorkload(workload)
        check_holds(fleet, trace.longest)
    elif workload.tasks:
        asked = TaskWorkload(workload)
        check_holds(fleet, LONGEST_PROMPT)
    else:
        asked = SyntheticWorkload(workload)
        check_holds(fleet, _shortest(workload.prompt) + _shortest(workload.output))
    mesh = SimulatedMesh(fleet, workload.seed)
    with rare_collections():
        mesh.run(asked, progress)
    check_conserved(mesh)
    counted_until = workload.seconds - workload.cool_down_seconds
    return result_of(mesh, objectives, workload.warm_up_seconds, counted_until)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage less often: a simulation makes few cycles, and each look at its millions of objects is slow."""
    usual = gc.get_threshold()
    gc.set_threshold(*COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def check_conserved(mesh: SimulatedMesh) -> None:
    """Raises SimulationBroken unless every request ended once and every block was freed."""
    numbers = [live.number for live in mesh.ended]
    if mesh.gateway.live or len(set(numbers)) != len(numbers) or len(numbers) != mesh.gateway.asked:
        raise SimulationBroken(f"{mesh.gateway.asked} requests came and {len(numbers)} ended")
    if mesh.held_blocks():
        raise SimulationBroken(f"{mesh.held_blocks()} blocks are held after the last request ended")


def _beside(file: Path, path: Path | None) -> Path | None:
    return None if path is None else file.parent / path


def _shortest(config: LengthConfig) -> int:
    """A length that many requests reach."""
    return int(min(config.mean, config.most))
