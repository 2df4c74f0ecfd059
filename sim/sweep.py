"""Many simulations: every combination of some settings, and the highest rate that keeps the objectives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from loadgen.summary import Objectives
from mesh.errors import ConfigError
from sim.result import Result
from sim.run import Progress, read_fleet, read_workload, simulate

RATE = "workload.arrivals.per_second"
SHORT = {"rate": RATE, "prefill": "fleet.prefill.replicas", "decode": "fleet.decode.replicas"}
# The highest rate is found to within this share of itself.
RATE_PRECISION = 0.03
# The search begins with the rate that gives this many requests.
FEWEST_REQUESTS = 20


@dataclass(frozen=True)
class Files:
    """A fleet, a workload, and settings that override keys of both."""

    fleet: Path
    workload: Path
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """One combination of settings, such as ("prefill=1", "decode=3"), and its result."""

    settings: tuple[str, ...]
    result: Result


def combinations(sweeps: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every combination of the settings that sweeps such as "decode=1,2" and "pd=1:3,2:2" list. Raises ConfigError."""
    axes = []
    for sweep in sweeps:
        name, separator, values = sweep.partition("=")
        if not separator or not name or not values:
            raise ConfigError(f"--sweep {sweep!r}: expected KEY=VALUE,VALUE such as decode=2,4 or pd=1:3,2:2")
        axes.append([_settings(name, value) for value in values.split(",")])
    for chosen in product(*axes):
        yield tuple(setting for settings in chosen for setting in settings)


def run_point(files: Files, settings: Sequence[str], objectives: Objectives, progress: Progress) -> Point:
    """Simulate one combination of settings. Raises ConfigError."""
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
    """The run at the highest rate at which at least `share` of the requests are good; None if none was found.

    Rates are tried down to an eighth of the first one.
    """
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
    """The settings for the fleet and those for the workload, each without the word that names the file.

    Raises ConfigError.
    """
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
