"""Runs the simulations of one `deepmesh simulate`, with a progress bar, and shows their results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mesh.errors import ConfigError

if TYPE_CHECKING:
    from loadgen.summary import Objectives
    from sim.sweep import Files, Point


def run_simulations(
    files: "Files", objectives: "Objectives", sweeps: Sequence[str], share: float | None, out: Path
) -> None:
    """Raises ConfigError."""
    from sim.plot import save_plot
    from sim.report import result_table, save, sweep_table
    from sim.sweep import combinations

    if share is not None and not 0 < share < 1:
        raise ConfigError("--find-rate takes a share between 0 and 1, such as 0.95")
    console = Console(width=140)
    points = _points(files, objectives, list(combinations(sweeps)), share, console)
    if not points:
        raise ConfigError("no rate is low enough for these objectives: relax them, or add workers")
    if len(points) == 1:
        console.print(result_table(" ".join(points[0].settings) or str(files.fleet), points[0].result))
    else:
        console.print(sweep_table(points))
    save(points, out / "simulation.json")
    save_plot(points, objectives, out / "simulation.png")
    console.print(f"{out / 'simulation.json'}, {out / 'simulation.png'}")


def _points(
    files: "Files",
    objectives: "Objectives",
    combinations: Sequence[tuple[str, ...]],
    share: float | None,
    console: Console,
) -> list["Point"]:
    from sim.run import read_workload
    from sim.sweep import highest_rate, overrides, run_point

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} s"), TimeElapsedColumn())
    points = []
    with Progress(*columns, console=console, transient=True) as progress:
        for settings in combinations:
            seconds = read_workload(files.workload, overrides([*files.settings, *settings])[1]).seconds
            task = progress.add_task(" ".join(settings) or "simulating", total=seconds)
            advance: Callable[[float], None] = lambda now, task=task: progress.update(task, completed=now)  # type: ignore[misc] # noqa: E731
            if share is None:
                points.append(run_point(files, settings, objectives, advance))
            elif (found := highest_rate(files, settings, objectives, share, advance)) is not None:
                points.append(found)
            progress.remove_task(task)
    return points
