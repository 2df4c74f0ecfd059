"""`deepmesh calibrate`: a cost file for placement, simulate and plan."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.endpoints import (
    GATEWAY,
    ApiKeyOption,
    MaybeGatewayOption,
    MeasuredSchedulerOption,
    OperatorsCertificates,
    certified_channels,
)

# More requests than any worker computes at once.
WIDEST = 65_536
# Length of the prompt whose time is shown, in tokens.
PROMPT = 1000


def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cost file.")] = Path("out/costs.json"),
    rank: Annotated[
        Path | None, typer.Option(metavar="JSON", help="rank.json of bench.rank, instead of a mesh that runs.")
    ] = None,
    endpoint: MaybeGatewayOption = None,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers that the mesh has.")] = 1,
    widths: Annotated[str, typer.Option(help="Requests at once on each decode worker.")] = "1,2,4,8,16,32",
    api_key: ApiKeyOption = None,
    scheduler: MeasuredSchedulerOption = None,
    certificates: OperatorsCertificates = None,
) -> None:
    """Measure the time of steps, prompts and calls, and write it to a cost file with its error.

    A mesh is measured through its gateway. It should be idle; the measurement takes a minute or two. If you name its
    scheduler, the file also says how fast KV moved in the traffic that the mesh has had. If the workers compute long
    prompts sparsely, the command also sends such prompts and records their time.
    """
    from capacity.calibration.mesh import MeshUnderTest, measure
    from capacity.calibration.rank import costs_of_rank
    from mesh.cost_file import save_costs
    from mesh.writable import make_writable

    console = Console(width=140)
    if rank is not None:
        file = costs_of_rank(rank)
    else:
        transfers = None if scheduler is None else (scheduler, certified_channels(certificates))
        make_writable(out)
        mesh = MeshUnderTest(endpoint or GATEWAY, decode, _numbers(widths), api_key=api_key, scheduler=transfers)
        file = measure(mesh, console.print)
    save_costs(file, out)
    error = "unknown" if file.error is None else f"{file.error:.1%} of a step at the most"
    console.print(f"{out}: error {error}, a prompt of {PROMPT:,} tokens in {file.costs.prefill_ms(PROMPT):,.0f} ms")


def _numbers(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and 0 < int(number) <= WIDEST for number in numbers):
        raise typer.BadParameter(f"expected numbers such as 1,4,16, each at most {WIDEST}", param_hint="--widths")
    return tuple(sorted({int(number) for number in numbers}))
