"""Many simulations: every combination of some settings, and the highest rate that keeps the objectives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.load.summary import Objectives
from mesh.errors import ConfigError
from sim.result import Result
from sim.run import Progress, read_fleet, read_workload, simulate

RATE = "workload.arrivals.per_second"
SHORT = {"rate": RATE, "prefill": "fleet.prefill.replicas", "decode": "fleet.decode.replicas"}
# A rate is found to this share of itself.
RATE_PRECISION = 0.03
# The lowest rate that is tried has so many requests.
FEWEST_REQUESTS = 20


@dataclass(frozen=True)
class Files:
    """A fleet, a workload, and settings that are laid over both."""

    fleet: Path
    workload: Path
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """One combination, e.g. ("prefill=1", "decode=3"), and what came of it."""

    settings: tuple[str, ...]
    result: Result


def combinations(sweeps: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """From "decode=1,2" and "pd=1:3,2:2" every combination of settings. Raises ConfigError."""
    axes = []
    for sweep in sweeps:
        name, separator, values = sweep.partition("=")
        if not separator or not name or not values:
            raise ConfigError(f"--sweep {sweep!r}: expected KEY=VALUE,VALUE such as decode=2,4 or pd=1:3,2:2")
        axes.append([_settings(name, value) for value in values.split(",")])
    for chosen in product(*axes):
        yield tuple(setting for settings in chosen for setting in settings)


def run_point(files: Files, settings: Sequence[str], objectives: Objectives, progress: Progress) -> Point:
    """Raises ConfigError."""
    fleet, workload = overrides([*files.settings, *settings])
    result = simulate(read_fleet(files.fleet, fleet), read_workload(files.workload, workload), objectives, progress)
    return Point(tuple(settings), result)


def highest_rate(
    files: Files,
    settings: Sequence[str],
    objectives: Objectives,
    share: float,
    progress: Callable[[float], None],
) -> Point | None:
    """The run at the highest rate at which that share of the requests is good; None if no rate is low enough."""
    fewest = FEWEST_REQUESTS / read_workload(files.workload, overrides([*files.settings, *settings])[1]).seconds
    best, low, high = None, 0.0, fewest
    while True:
        point = run_point(files, [*settings, f"{RATE}={high}"], objectives, progress)
        if point.result.summary.goodput.share < share:
            break
        best, low, high = point, high, high * 2
    while (high - low) / high > RATE_PRECISION and high > fewest / 8:
        middle = (low + high) / 2
        point = run_point(files, [*settings, f"{RATE}={middle}"], objectives, progress)
        if point.result.summary.goodput.share < share:
            high = middle
        else:
            best, low = point, middle
    return best


def overrides(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of the fleet and of the workload, each without its first word. Raises ConfigError."""
    fleet: list[str] = []
    workload: list[str] = []
    for setting in settings:
        name, separator, value = setting.partition("=")
        file, _, key = SHORT.get(name, name).partition(".")
        if not separator or file not in ("fleet", "workload") or not key:
            raise ConfigError(
                f"{setting!r}: expected fleet.KEY=VALUE, workload.KEY=VALUE, or one of {', '.join(SHORT)}"
            )
        (fleet if file == "fleet" else workload).append(f"{key}={value}")
    return fleet, workload


def _settings(name: str, value: str) -> tuple[str, ...]:
    if name != "pd":
        return (f"{name}={value}",)
    prefill, separator, decode = value.partition(":")
    if not separator:
        raise ConfigError(f"pd={value}: expected prefill:decode such as 1:3")
    return f"prefill={prefill}", f"decode={decode}"
