"""The summary of a run's records. Pure functions; percentiles interpolate linearly between the two nearest ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.records import RequestRecord


@dataclass(frozen=True)
class Distribution:
    """How one quantity is distributed, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Objectives:
    """Upper bounds a request must keep to count as good; None bounds nothing."""

    ttft_ms: float | None
    tpot_ms: float | None


@dataclass(frozen=True)
class Goodput:
    """Requests that completed within every objective."""

    requests: int
    requests_per_second: float
    # Share of all requests sent, including those that failed.
    share: float


@dataclass(frozen=True)
class TurnSummary:
    """The completed requests of some turns of sessions."""

    # "first turn" or "later turns".
    turns: str
    requests: int
    input_tokens: int
    # Prompt tokens that were found in caches; None if the endpoint does not say.
    cached_tokens: int | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None


@dataclass(frozen=True)
class Summary:
    """Rates count completed requests over `elapsed_s`: from the first scheduled arrival to the last message."""

    requests: int
    completed: int
    errors: dict[str, int]
    elapsed_s: float
    requests_per_minute: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    # How many of these came from workers' host memory, and from KV stores; 0 if the endpoint does not say.
    host_cached_tokens: int
    store_cached_tokens: int
    input_tokens_per_second: float
    output_tokens_per_second: float
    # Each is None if no request has the quantity.
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    # From the scheduled arrival to the last message.
    latency_ms: Distribution | None
    # The same over the answer's tokens (end-to-end-normalized interactivity, as time).
    answer_per_token_ms: Distribution | None
    # How late the generator itself woke for its arrivals.
    drift_ms: Distribution | None
    # Requests that max_concurrency held back.
    held_back: int
    goodput: Goodput
    # First turns of sessions and later ones; empty if no request is a later one.
    by_turn: tuple[TurnSummary, ...] = ()


def distribution(values_s: Sequence[float]) -> Distribution | None:
    """The distribution of values in seconds; None if there are none."""
    if not values_s:
        return None
    values_ms = np.asarray(values_s) * 1000
    p50, p90, p99 = np.percentile(values_ms, [50, 90, 99]).tolist()
    return Distribution(float(values_ms.mean()), p50, p90, p99, float(values_ms.max()))


def is_good(record: RequestRecord, objectives: Objectives) -> bool:
    """Completed within both objectives. An answer of one token has no time per token, and so keeps that objective."""
    if not record.completed or record.ttft_s is None:
        return False
    in_time = objectives.ttft_ms is None or record.ttft_s * 1000 <= objectives.ttft_ms
    at_pace = objectives.tpot_ms is None or record.tpot_s is None or record.tpot_s * 1000 <= objectives.tpot_ms
    return in_time and at_pace


def goodput(records: Sequence[RequestRecord], objectives: Objectives, elapsed_s: float) -> Goodput:
    good = sum(is_good(record, objectives) for record in records)
    return Goodput(good, _rate(good, elapsed_s), good / len(records) if records else 0.0)


def elapsed(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first scheduled arrival to the last message of any request."""
    ends = [
        time for record in records for time in (record.finished_s, *record.message_times_s[-1:]) if time is not None
    ]
    return max(ends) - min(record.scheduled_s for record in records) if ends else 0.0


def throughput_over_time(records: Sequence[RequestRecord], bins: int) -> tuple[list[float], list[float]]:
    """Edges (seconds, bins + 1 of them) and output tokens per second in each bin, as they arrived."""
    times = [time for record in records for time in record.message_times_s]
    weights = [weight for record in records for weight in _message_weights(record)]
    counts, edges = np.histogram(times, bins=bins, range=(0.0, max(times, default=1.0)), weights=weights)
    return edges.tolist(), (counts / np.diff(edges)).tolist()


def summarize(records: Sequence[RequestRecord], objectives: Objectives) -> Summary:
    completed = [record for record in records if record.completed]
    elapsed_s = elapsed(records)
    input_tokens = sum(record.prompt_tokens or 0 for record in completed)
    output_tokens = sum(record.generated_tokens for record in completed)
    return Summary(
        requests=len(records),
        completed=len(completed),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        elapsed_s=elapsed_s,
        requests_per_minute=60 * _rate(len(completed), elapsed_s),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.cached_tokens or 0 for record in completed),
        host_cached_tokens=sum(record.host_cached_tokens for record in completed),
        store_cached_tokens=sum(record.store_cached_tokens for record in completed),
        input_tokens_per_second=_rate(input_tokens, elapsed_s),
        output_tokens_per_second=_rate(output_tokens, elapsed_s),
        ttft_ms=_ttft(completed),
        tpot_ms=_tpot(completed),
        itl_ms=distribution([gap for record in completed for gap in record.inter_token_s]),
        latency_ms=distribution([r.finished_s - r.scheduled_s for r in completed if r.finished_s is not None]),
        answer_per_token_ms=distribution([s for record in completed if (s := record.answer_per_token_s) is not None]),
        drift_ms=distribution([r.woken_s - r.scheduled_s for r in records if r.woken_s is not None]),
        held_back=sum(record.held_back for record in records),
        goodput=goodput(records, objectives, elapsed_s),
        by_turn=_by_turn(completed),
    )


def _by_turn(completed: Sequence[RequestRecord]) -> tuple[TurnSummary, ...]:
    later = [record for record in completed if record.turn > 1]
    if not later:
        return ()
    first = [record for record in completed if record.turn == 1]
    return (_of_turns("first turn", first), _of_turns("later turns", later))


def _of_turns(turns: str, completed: Sequence[RequestRecord]) -> TurnSummary:
    cached = [record.cached_tokens for record in completed if record.cached_tokens is not None]
    return TurnSummary(
        turns=turns,
        requests=len(completed),
        input_tokens=sum(record.prompt_tokens or 0 for record in completed),
        cached_tokens=sum(cached) if cached else None,
        ttft_ms=_ttft(completed),
        tpot_ms=_tpot(completed),
    )


def _ttft(completed: Sequence[RequestRecord]) -> Distribution | None:
    return distribution([record.ttft_s for record in completed if record.ttft_s is not None])


def _tpot(completed: Sequence[RequestRecord]) -> Distribution | None:
    return distribution([record.tpot_s for record in completed if record.tpot_s is not None])


def _message_weights(record: RequestRecord) -> list[float]:
    """Tokens of each message, scaled so that they add up to what the endpoint reports."""
    counted = sum(record.message_tokens)
    return [tokens * record.generated_tokens / counted for tokens in record.message_tokens] if counted else []


def _rate(count: float, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0
