"""What one simulation found."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.records import RequestRecord
from loadgen.summary import Objectives, Summary, summarize
from mesh.domain.workers import WorkerRole
from sim.gateway import Live
from sim.simulation import SimulatedMesh


@dataclass(frozen=True)
class RoleUse:
    """Workers of one role, together."""

    replicas: int
    # Ranks of one worker. With more than one, every token's time was simulated.
    ranks: int
    # Share of the workers' lifetimes in which their devices computed.
    busy: float
    # The same for the busiest worker and for the least busy one.
    busiest: float
    idlest: float
    prompts: int
    output_tokens: int
    # How often the workers refused a request, which was then placed again.
    refused: int
    starts: int


@dataclass(frozen=True)
class CacheUse:
    """Prompt tokens of all counted requests, by where their KV came from."""

    # From KV pools, from workers' host memory, from stores.
    worker: int
    host: int
    store: int
    computed: int


@dataclass(frozen=True)
class Predictions:
    """Shares of the completed requests that came within 20% of what placement predicted."""

    ttft_within_20_percent: float
    tpot_within_20_percent: float


@dataclass(frozen=True)
class Result:
    """`seconds` is simulated time; `events` counts the actions that the timeline ran."""

    seconds: float
    events: int
    summary: Summary
    roles: dict[str, RoleUse]
    cache: CacheUse
    predictions: Predictions | None
    # Completed requests that were placed more than once.
    replaced: int
    faults: int
    # Number of failed requests by error and its first words.
    refusals: dict[str, int]
    replicas: dict[str, list[tuple[float, int]]]


def result_of(mesh: SimulatedMesh, objectives: Objectives, since: float = 0.0, until: float = float("inf")) -> Result:
    """The result of the requests that arrived at or after `since` and before `until`."""
    ended = sorted(mesh.ended, key=lambda live: live.number)
    counted = [live for live in ended if since <= live.record.scheduled_s < until]
    records = [live.record for live in counted]
    return Result(
        seconds=mesh.timeline.now,
        events=mesh.timeline.events,
        summary=summarize(records, objectives),
        roles={role.value: _use(mesh, role) for role in WorkerRole if mesh.lifecycle.workers[role]},
        cache=_cache(counted),
        predictions=_predictions(counted),
        replaced=sum(live.replaced > 0 and live.record.completed for live in counted),
        faults=mesh.faults.happened,
        refusals=dict(Counter(_words(record) for record in records if record.error is not None)),
        replicas={role.value: changes for role, changes in mesh.lifecycle.replicas.items()},
    )


def _use(mesh: SimulatedMesh, role: WorkerRole) -> RoleUse:
    workers = mesh.lifecycle.workers[role]
    tallies = [worker.tally for worker in workers]
    shares = [tally.busy_seconds / tally.lived_seconds for tally in tallies if tally.lived_seconds]
    lived = sum(tally.lived_seconds for tally in tallies)
    return RoleUse(
        replicas=len(workers),
        ranks=mesh.ranks(role),
        busy=sum(tally.busy_seconds for tally in tallies) / lived if lived else 0.0,
        busiest=max(shares, default=0.0),
        idlest=min(shares, default=0.0),
        prompts=sum(tally.prompts for tally in tallies),
        output_tokens=sum(tally.output_tokens for tally in tallies),
        refused=sum(tally.refused for tally in tallies),
        starts=sum(tally.lives for tally in tallies),
    )


def _cache(counted: Sequence[Live]) -> CacheUse:
    completed = [live for live in counted if live.record.completed]
    prompts = sum(live.record.prompt_tokens or 0 for live in completed)
    cached = sum(live.cached_tokens for live in completed)
    stored = sum(live.store_cached_tokens for live in completed)
    hosted = sum(live.host_cached_tokens for live in completed)
    return CacheUse(cached - stored - hosted, hosted, stored, prompts - cached)


def _predictions(counted: Sequence[Live]) -> Predictions | None:
    ttfts, tpots = [], []
    for live in counted:
        record = live.record
        if not record.completed or live.predicted_ttft_ms is None or live.predicted_tpot_ms is None:
            continue
        if record.ttft_s is not None:
            ttfts.append(live.predicted_ttft_ms / 1000 / record.ttft_s)
        if record.tpot_s:
            tpots.append(live.predicted_tpot_ms / 1000 / record.tpot_s)
    return Predictions(_within(ttfts), _within(tpots)) if ttfts else None


def _within(ratios: Sequence[float]) -> float:
    found = np.asarray(ratios)
    return float(np.mean((found > 0.8) & (found < 1.2))) if len(found) else 1.0


def _words(record: RequestRecord) -> str:
    """The error without the part of its message that differs from request to request."""
    return f"{record.error}: {(record.error_message or '').partition(':')[0]}"
