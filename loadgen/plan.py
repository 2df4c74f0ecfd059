"""What a load run sends, and when: drawn before the clock starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from loadgen import arrivals, workload
from loadgen.client import Target
from loadgen.options import DEFAULT_REQUESTS, LONGEST_RUN_S, SESSIONS, TASKS, LoadOptions
from loadgen.sessions import session_jobs
from loadgen.trace_jobs import TraceJobs
from loadgen.traces import is_trace, mooncake_rows
from loadgen.workload import Job
from mesh.errors import ConfigError

DEFAULT_VOCABULARY = 1000


@dataclass(frozen=True)
class Plan:
    """The requests and their arrivals: `jobs[i]` arrives at `times_s[i]`."""

    jobs: Sequence[Job]
    times_s: list[float]
    # Requests that each job leads to; further ones arrive after the answer to the one before.
    turns: int = 1


def plan(options: LoadOptions, target: Target, *, seed_offset: int = 0) -> Plan:
    """Arrivals and jobs; equal options give equal plans.

    seed_offset: added to the options' seed. Raises ConfigError for a bad dataset, or if the last request would arrive
    after more than a month.
    """
    seed = options.seed + seed_offset
    vocabulary_size = options.vocabulary_size or target.vocabulary_size or DEFAULT_VOCABULARY
    rows: list[Job] = []
    if options.dataset is not None and options.reads_file:
        lines = workload.read_lines(options.dataset)
        if is_trace(lines):
            replayed = mooncake_rows(options.dataset, lines)
            return _replay(options, TraceJobs(replayed, seed, vocabulary_size, as_text=options.url is not None))
        rows = workload.dataset_rows(options.dataset, lines, options.osl)
    arrival_random, job_random = np.random.default_rng(seed).spawn(2)
    times = _bounded(options, _times(options, arrival_random, len(rows) or DEFAULT_REQUESTS))
    jobs = workload.dataset_jobs(rows) if rows else _drawn_jobs(options, seed, vocabulary_size, job_random)
    turns = options.turns if options.dataset == SESSIONS else 1
    return Plan(list(islice(jobs, len(times))), times, turns)


def _drawn_jobs(options: LoadOptions, seed: int, vocabulary_size: int, generator: np.random.Generator) -> Iterator[Job]:
    if options.dataset == TASKS:
        return workload.task_jobs(seed)
    if options.dataset == SESSIONS:
        return session_jobs(options, vocabulary_size, generator)
    return workload.synthetic_jobs(options, vocabulary_size, generator)


def _times(options: LoadOptions, generator: np.random.Generator, count: int) -> list[float]:
    if options.duration_s is not None:
        return arrivals.arrival_times_within(options.rate, generator, duration_s=options.duration_s)
    return arrivals.arrival_times(options.rate, generator, count=options.requests or count)


def _replay(options: LoadOptions, jobs: TraceJobs) -> Plan:
    """The trace's first requests at its own times, `rate` times as fast."""
    times = [row.timestamp / 1000 / options.rate for row in jobs.rows[: options.requests]]
    if options.duration_s is not None:
        times = [time_s for time_s in times if time_s < options.duration_s]
    return Plan(replace(jobs, rows=jobs.rows[: len(times)]), _bounded(options, times))


def _bounded(options: LoadOptions, times: list[float]) -> list[float]:
    if times[-1] > LONGEST_RUN_S:
        raise ConfigError(f"at rate {options.rate:g} the last of {len(times):,} requests arrives after a month")
    return times
