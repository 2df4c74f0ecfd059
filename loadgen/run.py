"""Open-loop load: every request is sent at its scheduled arrival, whatever became of those before it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen import plot, report, search
from loadgen.client import LoadClient, Target
from loadgen.grpc_client import GrpcClient
from loadgen.openai_client import OpenAILoadClient
from loadgen.options import LoadOptions
from loadgen.plan import plan
from loadgen.records import RequestRecord
from loadgen.report import Report
from loadgen.sending import Sending, Shown
from loadgen.summary import Objectives, summarize
from loadgen.workload import read_lines
from mesh.errors import ConfigError
from mesh.rpc.channel import Channels
from mesh.writable import make_writable

# The plot lies next to the report.
PLOT = ".png"


def _show_nothing(sent: int, ended: int, total: int) -> None:
    """For runs without a terminal that shows them."""


def main(options: LoadOptions, console: Console | None = None) -> Report:
    """Run, save the JSON and the plot, and print the table last: what `deepmesh bench` does.

    With `find_rate` set, report, plot and table are those of the run at the rate found; a table of all rates comes
    first, and one line with the result last. Ctrl-C ends the run; what was measured until then is saved and printed.

    Raises ConfigError for a bad dataset or a file that cannot be written, EndpointUnavailable, UnknownModel.
    """
    console = console or Console()
    path = options.output or Path("out") / f"load-{datetime.now():%Y%m%d-%H%M%S}.json"
    if path.suffix == PLOT:
        raise ConfigError(f"cannot write the report to {path}: the plot will be there; name a .json file")
    make_writable(path, path.with_suffix(PLOT))
    if options.dataset is not None and options.reads_file:
        # A bad path is told before the endpoint is asked.
        read_lines(options.dataset)
    found = _found(options, console) if options.find_rate else None
    result = run_load(options, console) if found is None else found.best
    try:
        report.save(result, path)
        plot.save(result, path.with_suffix(PLOT))
    finally:
        # Print the table even if saving failed: the disk may have filled up since the run began.
        console.print(report.table(result))
    console.print(f"saved {path} and {path.with_suffix(PLOT)}")
    if found is not None:
        console.print(search.line(found), soft_wrap=True, highlight=False)
    return result


def _found(options: LoadOptions, console: Console) -> search.Found:
    found = search.find_rate(options, lambda trial: run_load(trial, console))
    console.print(search.table(found))
    return found


def run_load(options: LoadOptions, console: Console | None = None) -> Report:
    """Run one load on an event loop of its own and return what was measured, until Ctrl-C if that comes first.

    console: where progress is shown, if it is a terminal.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _shown_on(console) as shown:
        # The runner turns Ctrl-C into a cancellation.
        return runner.run(load(options, shown, keep_when_cancelled=True))


async def load(
    options: LoadOptions, shown: Shown = _show_nothing, *, keep_when_cancelled: bool = False, after_s: float = 0.0
) -> Report:
    """As `run_load`, on the running event loop.

    keep_when_cancelled: whether a cancelled run still returns a report of what was measured. after_s: seconds before
    the first arrival, so that a load can follow another one whose answers still run.
    """
    client: LoadClient = GrpcClient(options, Channels()) if options.grpc else OpenAILoadClient(options)
    try:
        target = await client.discover()
        drawn = plan(options, target)
        counted = replace(drawn, times_s=[time_s + after_s for time_s in drawn.times_s])
        await _warm_up(client, options, target)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        sending = Sending(client, counted, options.max_concurrency, shown)
        records = sending.records
        try:
            await sending.run()
            interrupted = False
        except asyncio.CancelledError:
            if not keep_when_cancelled:
                raise
            interrupted = True
            records = _as_far_as_sent(records)
    finally:
        await client.close()
    objectives = Objectives(ttft_ms=options.ttft_slo_ms, tpot_ms=options.tpot_slo_ms)
    return Report(started_at, target.model, options, summarize(records, objectives), records, interrupted)


@contextmanager
def _shown_on(console: Console | None) -> Iterator[Shown]:
    """Show a progress bar of the answers if the console is a terminal."""
    if console is None or not console.is_terminal:
        yield _show_nothing
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("connecting, warming up", total=None)

        def show(sent: int, ended: int, total: int) -> None:
            progress.update(task, description=f"{sent - ended} in flight, answered", completed=ended, total=total)

        yield show


async def _warm_up(client: LoadClient, options: LoadOptions, target: Target) -> None:
    """Open connections and fill caches that are the server's own, with prompts that the run does not repeat."""
    if options.warmup == 0:
        return
    once = options.model_copy(update={"requests": options.warmup, "duration_s": None})
    for index, job in enumerate(plan(once, target, seed_offset=1).jobs):
        await client.send(job, RequestRecord(index, 0.0, job.max_tokens), time.perf_counter)


def _as_far_as_sent(records: list[RequestRecord]) -> list[RequestRecord]:
    """The requests that were sent before the run was stopped; those that were still in flight count as failed.

    Raises CancelledError if there are none.
    """
    if not records:
        raise asyncio.CancelledError
    for record in records:
        if record.finished_s is None and record.error is None:
            record.fail("interrupted", "the run was stopped")
    return records
