"""Open-loop load: every request is sent at its scheduled arrival, whatever became of those before it."""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console

from bench.load import arrivals, plot, report, workload
from bench.load.client import Clock, LoadClient, Target
from bench.load.grpc_client import GrpcClient
from bench.load.openai_client import OpenAILoadClient
from bench.load.options import DEFAULT_REQUESTS, LoadOptions
from bench.load.records import RequestRecord
from bench.load.report import Report
from bench.load.summary import Objectives, summarize
from bench.load.workload import Job
from mesh.channel import Channels

DEFAULT_VOCABULARY = 1000


@dataclass(frozen=True)
class Plan:
    """What arrives when: `jobs[i]` at `times_s[i]`."""

    jobs: list[Job]
    times_s: list[float]


def main(options: LoadOptions, console: Console | None = None) -> Report:
    """Run, save the JSON and the plot, and print the table last: what `deepmesh bench` does.

    Raises ConfigError for a bad dataset, EndpointUnavailable, UnknownModel.
    """
    console = console or Console()
    result = run_load(options)
    path = options.output or Path("out") / f"load-{datetime.now():%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report.save(result, path)
    plot.save(result, path.with_suffix(".png"))
    console.print(report.table(result))
    console.print(f"saved {path} and {path.with_suffix('.png')}")
    return result


def run_load(options: LoadOptions) -> Report:
    """Run one load on an event loop of its own and return what was measured."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(load(options))


async def load(options: LoadOptions) -> Report:
    """The same, on the loop that runs."""
    client: LoadClient = GrpcClient(options, Channels()) if options.grpc else OpenAILoadClient(options)
    try:
        target = await client.discover()
        counted = plan(options, target)
        await _warm_up(client, options, target)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        records = await _run(client, counted, options.max_concurrency)
    finally:
        await client.close()
    objectives = Objectives(ttft_ms=options.ttft_slo_ms, tpot_ms=options.tpot_slo_ms)
    return Report(started_at, target.model, options, summarize(records, objectives), records)


def plan(options: LoadOptions, target: Target, *, seed_offset: int = 0) -> Plan:
    """Arrivals and jobs, drawn before the clock starts; equal options give equal plans."""
    arrival_random, job_random = np.random.default_rng(options.seed + seed_offset).spawn(2)
    from_file = options.dataset if options.dataset != workload.TASKS else None
    rows = workload.read_dataset(from_file, options.osl) if from_file else []
    if options.duration_s is not None:
        times = arrivals.arrival_times_within(options.rate, arrival_random, duration_s=options.duration_s)
    else:
        count = options.requests or len(rows) or DEFAULT_REQUESTS
        times = arrivals.arrival_times(options.rate, arrival_random, count=count)
    if rows:
        jobs = workload.dataset_jobs(rows)
    elif options.dataset is not None:
        jobs = workload.task_jobs(options.seed + seed_offset)
    else:
        vocabulary_size = options.vocabulary_size or target.vocabulary_size or DEFAULT_VOCABULARY
        jobs = workload.synthetic_jobs(options, vocabulary_size, job_random)
    return Plan(list(islice(jobs, len(times))), times)


async def _warm_up(client: LoadClient, options: LoadOptions, target: Target) -> None:
    """Open connections and fill caches that are the server's own, with prompts that the run does not repeat."""
    if options.warmup == 0:
        return
    once = options.model_copy(update={"requests": options.warmup, "duration_s": None})
    for index, job in enumerate(plan(once, target, seed_offset=1).jobs):
        await client.send(job, RequestRecord(index, 0.0, job.max_tokens), time.perf_counter)


async def _run(client: LoadClient, counted: Plan, max_concurrency: int | None) -> list[RequestRecord]:
    guard = asyncio.Semaphore(max_concurrency or len(counted.jobs))
    schedule = enumerate(zip(counted.jobs, counted.times_s, strict=True))
    records = [RequestRecord(index, time_s, job.max_tokens) for index, (job, time_s) in schedule]
    start = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start

    async with asyncio.TaskGroup() as tasks:
        for job, record in zip(counted.jobs, records, strict=True):
            await _sleep_until(record.scheduled_s, clock)
            record.woken_s = clock()
            tasks.create_task(_send(client, job, record, guard, clock))
    return records


async def _send(client: LoadClient, job: Job, record: RequestRecord, guard: asyncio.Semaphore, clock: Clock) -> None:
    record.held_back = guard.locked()
    async with guard:
        await client.send(job, record, clock)


async def _sleep_until(time_s: float, clock: Clock) -> None:
    # Sleep even if there is nothing to wait for, so that the requests already started can run.
    await asyncio.sleep(max(0.0, time_s - clock()))
