"""What a load run leaves: a report, as JSON with every record and as a table to read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from loadgen.options import SESSIONS, LoadOptions
from loadgen.records import RequestRecord
from loadgen.summary import Distribution, Summary

# A generator that wakes later than this at p99 measures itself as well as the endpoint.
SUSPECT_DRIFT_MS = 10.0


@dataclass(frozen=True)
class Report:
    """All results of one run. `started_at` is ISO 8601, UTC."""

    started_at: str
    model: str
    options: LoadOptions
    summary: Summary
    records: list[RequestRecord]
    # Whether the run was stopped before its last arrival, or while requests were in flight.
    interrupted: bool = False


def save(report: Report, path: Path) -> None:
    """Write the whole report; an infinite rate is written as null."""
    content = msgspec.json.encode(report, enc_hook=_plain)
    path.write_bytes(msgspec.json.format(content, indent=1))


def table(report: Report) -> Table:
    """A table with latencies by percentile above, totals and rates below."""
    options, summary = report.options, report.summary
    title = f"{report.model} at {options.url or options.grpc}: rate {options.rate:g}, {_shape(options)}"
    rows = Table(title=title, title_justify="left", caption=_caption(report), caption_justify="left")
    rows.add_column("")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        rows.add_column(heading, justify="right")
    for label, values in _latencies(summary):
        rows.add_row(label, *_cells(values))
    rows.add_section()
    for label, text in _totals(report):
        rows.add_row(label, text)
    return rows


def _shape(options: LoadOptions) -> str:
    if options.dataset == SESSIONS:
        return f"sessions of {options.turns} turns: {options.isl} in, {options.osl} out, {options.turn_tokens} added"
    return str(options.dataset) if options.dataset else f"{options.isl} in, {options.osl} out"


def _latencies(summary: Summary) -> list[tuple[str, Distribution | None]]:
    return [
        ("TTFT, ms", summary.ttft_ms),
        ("TPOT, ms", summary.tpot_ms),
        ("ITL, ms", summary.itl_ms),
        ("whole answer, ms", summary.latency_ms),
        ("whole answer, ms a token", summary.answer_per_token_ms),
        ("arrival drift, ms", summary.drift_ms),
        *((f"TTFT of {each.turns}, ms", each.ttft_ms) for each in summary.by_turn),
        *((f"TPOT of {each.turns}, ms", each.tpot_ms) for each in summary.by_turn),
    ]


def _cells(values: Distribution | None) -> list[str]:
    if values is None:
        return ["-"] * 5
    return [f"{value:.2f}" for value in (values.mean, values.p50, values.p90, values.p99, values.max)]


def _totals(report: Report) -> list[tuple[str, str]]:
    summary, options = report.summary, report.options
    totals = [
        ("requests completed", f"{summary.completed} of {summary.requests}"),
        *((f"failed: {kind}", str(count)) for kind, count in sorted(summary.errors.items())),
        ("elapsed, s", f"{summary.elapsed_s:.2f}"),
        ("requests/min", f"{summary.requests_per_minute:.1f}"),
        ("input tokens/s", f"{summary.input_tokens_per_second:.1f}"),
        ("output tokens/s", f"{summary.output_tokens_per_second:.1f}"),
        ("cached tokens", _hits(summary.cached_tokens, summary.input_tokens)),
        *_by_tier(summary),
        *((f"cached, {each.turns}", _hits(each.cached_tokens, each.input_tokens)) for each in summary.by_turn),
    ]
    if report.interrupted:
        totals.append(("stopped early", "as asked"))
    if summary.held_back:
        totals.append(("held back", f"{summary.held_back} (max concurrency {options.max_concurrency})"))
    if options.ttft_slo_ms is not None or options.tpot_slo_ms is not None:
        good = summary.goodput
        totals.append(("goodput, requests/s", f"{good.requests_per_second:.2f} ({good.share:.1%})"))
    return totals


def _by_tier(summary: Summary) -> list[tuple[str, str]]:
    """What did not come from KV pools, by where it came from."""
    tiers = (("host memory", summary.host_cached_tokens), ("KV stores", summary.store_cached_tokens))
    return [(f"cached, from {tier}", _hits(tokens, summary.input_tokens)) for tier, tokens in tiers if tokens]


def _hits(cached_tokens: int | None, input_tokens: int) -> str:
    if cached_tokens is None:
        return "the endpoint does not say"
    share = f" ({cached_tokens / input_tokens:.1%})" if input_tokens else ""
    return f"{cached_tokens} of {input_tokens}{share}"


def _caption(report: Report) -> Text | None:
    """The message of the first failed request of each kind, and a caution if the generator may be to blame."""
    told: dict[str, str] = {}
    for record in report.records:
        if record.error is not None:
            told.setdefault(record.error, record.error_message or "")
    lines = [f"{kind}: {message}" for kind, message in sorted(told.items()) if message]
    caution = _caution(report.summary)
    return Text("\n".join(filter(None, (*lines, caution)))) if lines or caution else None


def _caution(summary: Summary) -> str | None:
    if summary.drift_ms is None or summary.drift_ms.p99 <= SUSPECT_DRIFT_MS:
        return None
    return "The generator itself was late: latencies include its own delay. Use a lower rate or a faster machine."


def _plain(value: Any) -> Any:
    assert isinstance(value, BaseModel), f"no JSON form for {type(value).__name__}"
    return value.model_dump(mode="json", exclude={"api_key"})
