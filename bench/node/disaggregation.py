"""Prompts with answers compared with prompts on GPUs of their own: meshes on the same GPUs under the same load.

`python -m bench.node.disaggregation [--gpus N] [--rates 4 8] [--warm-up 10] [--seconds 30] [--settle 0]
[--isl 3500] [--osl 400] [--layers N] [--tpot-ms MS] [--model DIR] [--meshes NAME ...] [--same-prompts] [--next-n N]
[--role-changes] [--set SERVICE.KEY=VALUE] [--output FILE] [--plot FILE]`

Each mesh is what `deepmesh up --gpus N` starts with --split 1D ("ifb": one worker, dp and ep N; "aligned ifb": with
engine.parallel.prompt_wait_steps; "divided ifb": with engine.parallel.context_parallel_tokens instead, all ranks
compute a prompt together) and with 1P+1D ("pd": two workers of dp and ep N / 2). They serve DeepSeek-R1's first
layers with random weights, INT4 experts and KV in FP8, or the checkpoint --model. Requests arrive by a Poisson process;
lengths are uniform within 30% of --isl and --osl. Requests at the first rate warm the mesh up and are not counted. Then
each rate follows the one before without a pause, so that new requests meet answers at all positions. With --settle,
requests of a rate's first and last seconds do not count, because they meet answers of another rate. A request is good
if its first token comes within 2 s and the others in --tpot-ms each, by default 50 ms scaled by the share of R1's 61
layers that the model has. With --same-prompts each rate first sends the requests of the rate before once more, of which
all but 1 to 64 tokens are cached. With --next-n an MTP module drafts tokens; its weights are random too, so that no
draft is right. With --role-changes the prefill worker of "pd" finally becomes a decode worker and then a prefill worker
again, and requests are sent after each change. --plot draws good requests, times per token, and how evenly tokens come,
over the rates.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.meshes.model_mesh import ModelMesh, model_mesh
from bench.meshes.random_model import write_random_model
from bench.node.goodput_plot import Point, plot
from bench.node.served_meshes import EXPERTS, MESHES, SHAPE, TTFT_MS, Options, load_options, settings_of
from loadgen.report import Report
from loadgen.run import load
from loadgen.summary import Objectives, Summary, summarize
from mesh.domain.workers import WorkerRole

# Runs the `deepmesh` command, which may not be on the path.
COMMAND_LINE = "from cli.main import main; main()"
# Requests that are sent after a change of roles.
FEW_REQUESTS = 8
# The number of the warm-up load, which is not counted.
WARM_UP = 1000


@dataclass(frozen=True)
class Measured:
    mesh: str
    rate: float
    summary: Summary


@dataclass(frozen=True)
class RoleChange:
    role: str
    # Seconds from the command until the worker serves, its drain included; None if it never serves.
    seconds: float | None
    # How many of the FEW_REQUESTS after the change completed.
    completed: int


@dataclass(frozen=True)
class Result:
    options: Options
    measured: list[Measured]
    changes: list[RoleChange]


async def run(options: Options, log: Path, console: Console) -> Result:
    measured: list[Measured] = []
    changes: list[RoleChange] = []
    with ExitStack() as stack:
        directory = options.model
        if directory is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            directory = write_random_model(scratch, SHAPE, options.layers, EXPERTS, min(options.next_n, 1))
        for name in options.meshes:
            started = time.monotonic()
            prefill = int(name == "pd")
            async with model_mesh(
                log, model_dir=directory, prefill=prefill, settings=settings_of(name, options)
            ) as mesh:
                console.print(f"{name}: serves after {time.monotonic() - started:.1f} s")
                measured += await _all_rates(name, mesh, options)
                console.print(table(options, measured))
                if prefill and options.role_changes:
                    changes = await _changes(mesh, options)
    return Result(options, measured, changes)


async def _all_rates(name: str, mesh: ModelMesh, options: Options) -> list[Measured]:
    """Run one rate after the other. Each begins while answers of the one before still run."""
    # All prompts are drawn before the first is sent: drawing holds up the event loop, which notes when tokens come.
    async with asyncio.TaskGroup() as loads:
        begins = options.warm_up_seconds
        if begins:
            warm_up = load_options(mesh.gateway, options, options.rates[0], WARM_UP, seconds=begins)
            loads.create_task(load(warm_up))
        counted = []
        for number, rate in enumerate(options.rates):
            task = loads.create_task(load(load_options(mesh.gateway, options, rate, number), after_s=begins))
            counted.append((rate, begins, task))
            begins += options.seconds
    return [Measured(name, rate, settled(task.result(), begins, options)) for rate, begins, task in counted]


def settled(report: Report, begins: float, options: Options) -> Summary:
    """Summarize the requests that count. begins: when the rate begins, in seconds of the report."""
    first, last = begins + options.settle_seconds, begins + options.seconds - options.settle_seconds
    counted = [record for record in report.records if first <= record.scheduled_s < last]
    return summarize(counted, Objectives(ttft_ms=TTFT_MS, tpot_ms=options.tpot_ms))


async def _changes(mesh: ModelMesh, options: Options) -> list[RoleChange]:
    """Change the worker's role to decode and back. Stops at a change that fails."""
    changes: list[RoleChange] = []
    for number, role in enumerate((WorkerRole.DECODE, WorkerRole.PREFILL), start=len(options.rates)):
        if all(change.seconds is not None for change in changes):
            changes.append(await _change(mesh, options, role, number))
    return changes


async def _change(mesh: ModelMesh, options: Options, role: WorkerRole, number: int) -> RoleChange:
    started = time.monotonic()
    command = "role", "prefill-0", role.value, "--scheduler", mesh.scheduler
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", COMMAND_LINE, *command)
    if await process.wait():
        return RoleChange(role.value, None, 0)
    seconds = time.monotonic() - started
    after = await load(load_options(mesh.gateway, options, max(options.rates), number, requests=FEW_REQUESTS))
    return RoleChange(role.value, seconds, after.summary.completed)


def table(options: Options, measured: Sequence[Measured]) -> Table:
    shown = Table(title=f"{options.isl} tokens in, {options.osl} out; at most {options.tpot_ms:.1f} ms a token is good")
    columns = (
        "mesh",
        "requests/s",
        "ended",
        "good",
        "good/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "ITL p50",
        "ITL p99",
    )
    for column in (*columns, "ITL max", "ITL p99/p50", "tokens/s"):
        shown.add_column(column, justify="right")
    for each in measured:
        summary = each.summary
        cells = [each.mesh, f"{each.rate:g}", f"{summary.completed}/{summary.requests}"]
        cells += [f"{summary.goodput.share:.0%}", f"{summary.goodput.share * each.rate:.2f}"]
        ttft, tpot, itl = summary.ttft_ms, summary.tpot_ms, summary.itl_ms
        if ttft is not None and tpot is not None and itl is not None:
            times = ttft.p50, ttft.p99, tpot.p50, itl.p50, itl.p99, itl.max
            cells += [*(f"{time_ms:.1f}" for time_ms in times), f"{itl.p99 / itl.p50:.2f}"]
            cells.append(f"{summary.output_tokens_per_second:,.0f}")
        shown.add_row(*cells)
    return shown


def points_of(measured: Sequence[Measured]) -> list[Point]:
    """One point for each load in which tokens came."""
    points = []
    for each in measured:
        summary = each.summary
        if summary.tpot_ms is not None and summary.itl_ms is not None:
            times = summary.tpot_ms.p50, summary.itl_ms.p99 / summary.itl_ms.p50
            points.append(Point(each.mesh, each.rate, summary.goodput.share, *times))
    return points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals, for each rate")
    parser.add_argument("--settle", type=float, default=0.0, help="seconds at a rate's begin and end, not counted")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of arrivals before, not counted")
    parser.add_argument("--isl", type=int, default=3500)
    parser.add_argument("--osl", type=int, default=400)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--tpot-ms", type=float, help="the most a token of a good request takes")
    parser.add_argument("--model", type=Path, help="a checkpoint's directory")
    parser.add_argument("--max-requests", type=int, default=128, help="that a rank runs at once")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="SERVICE.KEY=VALUE")
    parser.add_argument("--output", type=Path, default=Path("out/disaggregation.json"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of the meshes over the rates")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=MESHES)
    parser.add_argument("--gpus", type=int, default=2, help="an even number")
    parser.add_argument("--next-n", type=int, default=0, help="drafts behind each token")
    parser.add_argument("--role-changes", action="store_true", help="of the prefill worker, there and back")
    parser.add_argument("--same-prompts", action="store_true", help="so that those of an earlier rate are cached")
    given = parser.parse_args()
    if 2 * given.settle >= given.seconds:
        parser.error("--settle leaves nothing of --seconds to count")
    if given.gpus < 2 or given.gpus % 2:
        parser.error("--gpus must be even: half of them compute prompts in one of the meshes")
    output: Path = given.output
    output.parent.mkdir(parents=True, exist_ok=True)
    options = Options(
        tuple(given.rates), given.seconds, given.isl, given.osl, given.layers, given.model, given.max_requests,
        given.gpus, tuple(given.meshes), tuple(given.settings), given.warm_up, given.same_prompts, given.next_n,
        given.role_changes, given.settle, given.tpot_ms,
    )  # fmt: skip
    console = Console(width=150, highlight=False)
    result = uvloop.run(run(options, output.with_suffix(".log"), console))
    output.write_bytes(msgspec.json.encode(result, enc_hook=str))
    if given.plot is not None:
        plot(points_of(result.measured), options.tpot_ms, given.plot)
    for change in result.changes:
        if change.seconds is None:
            console.print(f"prefill-0 does not become a {change.role} worker: see {output.with_suffix('.log')}")
        else:
            console.print(
                f"prefill-0 serves as {change.role} worker after {change.seconds:.1f} s;"
                f" {change.completed} of {FEW_REQUESTS} requests behind it ended"
            )
    return int(any(change.seconds is None for change in result.changes))


if __name__ == "__main__":
    sys.exit(main())
