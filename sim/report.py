"""Results as tables to read and as JSON."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from loadgen.summary import Distribution
from sim.result import Result
from sim.sweep import Point


def save(points: Sequence[Point], path: Path) -> None:
    """Write the results as JSON. Equal results give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(points)), indent=1) + b"\n")


def result_table(title: str, result: Result) -> Table:
    """A table with latencies above and totals below."""
    summary = result.summary
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right")
    table.add_row("TTFT, ms", *_cells(summary.ttft_ms))
    table.add_row("TPOT, ms", *_cells(summary.tpot_ms))
    if max(role.ranks for role in result.roles.values()) > 1:
        table.add_row("between tokens, ms", *_cells(summary.itl_ms))
    table.add_row("whole answer, ms", *_cells(summary.latency_ms))
    table.add_section()
    for label, text in _totals(result):
        table.add_row(label, text)
    return table


def sweep_table(points: Sequence[Point]) -> Table:
    """A table with one row for each combination, the best goodput last."""
    table = Table()
    for heading in ("settings", "good/min", "good", "TTFT p50", "p99, ms", "TPOT p50", "p99, ms", "P busy", "D busy"):
        table.add_column(heading, justify="left" if heading == "settings" else "right")
    for point in sorted(points, key=lambda each: each.result.summary.goodput.requests_per_second):
        summary, roles = point.result.summary, point.result.roles
        busy = [f"{roles[role].busy:.0%}" if role in roles else "-" for role in ("prefill", "decode")]
        table.add_row(
            " ".join(point.settings),
            f"{60 * summary.goodput.requests_per_second:.1f}",
            f"{summary.goodput.share:.1%}",
            *_two(summary.ttft_ms),
            *_two(summary.tpot_ms),
            *busy,
        )
    return table


def _totals(result: Result) -> list[tuple[str, str]]:
    summary, cache = result.summary, result.cache
    prompts = max(1, cache.worker + cache.host + cache.store + cache.computed)
    hosted = f"{cache.host / prompts:.1%} from host memory, " if cache.host else ""
    rows = [
        ("requests", f"{summary.completed} of {summary.requests} completed, {result.replaced} of them placed again"),
        ("goodput", f"{60 * summary.goodput.requests_per_second:.1f} a minute, {summary.goodput.share:.1%} of all"),
        ("output", f"{summary.output_tokens_per_second:,.0f} tokens/s"),
        (
            "prompt tokens",
            f"{cache.worker / prompts:.1%} from workers, {hosted}{cache.store / prompts:.1%} from stores, "
            f"{cache.computed / prompts:.1%} computed",
        ),
    ]
    for role, use in result.roles.items():
        spread = f"{use.idlest:.0%} to {use.busiest:.0%}"
        rows.append((role, f"{use.replicas} workers, {use.busy:.0%} busy ({spread}), {use.refused} refusals"))
    if result.predictions is not None:
        found = result.predictions
        text = f"TTFT {found.ttft_within_20_percent:.0%}, TPOT {found.tpot_within_20_percent:.0%} within 20%"
        rows.append(("predictions", text))
    rows += [(f"refused: {count}", words) for words, count in sorted(result.refusals.items())]
    return rows


def _cells(values: Distribution | None) -> list[str]:
    if values is None:
        return ["-"] * 5
    return [f"{value:.2f}" for value in (values.mean, values.p50, values.p90, values.p99, values.max)]


def _two(values: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if values is None else (f"{values.p50:.0f}", f"{values.p99:.0f}")
