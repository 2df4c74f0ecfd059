"""`deepmesh simulate`: simulates a fleet of any size under any load."""

from pathlib import Path
from typing import Annotated

import typer


def simulate(
    fleet: Annotated[Path, typer.Option(metavar="FILE", help="YAML: workers, stores, scheduler, faults.")],
    workload: Annotated[Path, typer.Option(metavar="FILE", help="YAML: arrivals and lengths, or a trace.")],
    slo: Annotated[str, typer.Option(help="Objectives that goodput is judged by.")] = "ttft=2s,tpot=50ms",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FILE.KEY=VALUE", help="E.g. fleet.decode.replicas=4; repeatable."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="Every combination: a key as of --set, or rate, prefill, decode, pd (as 1:3); repeatable.",
        ),
    ] = None,
    find_rate: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="The highest rate at which this share of the requests is good."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="For simulation.json and simulation.png.")] = Path("out"),
) -> None:
    """Run the scheduler's, the engines' and the stores' own code in simulated time.

    Times come from a cost file (see calibrate). Equal files and seeds give equal results, to the byte.
    """
    from cli.simulations import run_simulations
    from sim.run import read_objectives
    from sim.sweep import Files

    files = Files(fleet, workload, tuple(settings or ()))
    run_simulations(files, read_objectives(slo), sweep or [], find_rate, out)
