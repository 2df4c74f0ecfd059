"""The picture of a load run: how TTFT and TPOT are distributed, and throughput over time."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from loadgen.report import Report
from loadgen.summary import throughput_over_time

BLUE, ORANGE, GREY = "#2563eb", "#d97706", "#6b7280"
TIME_BINS = 60


def save(report: Report, path: Path) -> None:
    """Write a PNG of three panels."""
    figure = Figure(figsize=(13, 4), dpi=130, layout="constrained")
    ttft_axes, tpot_axes, rate_axes = figure.subplots(1, 3)
    completed = [record for record in report.records if record.completed]
    options = report.options
    ttfts = [record.ttft_s * 1000 for record in completed if record.ttft_s is not None]
    tpots = [record.tpot_s * 1000 for record in completed if record.tpot_s is not None]
    _cumulative(ttft_axes, "Time to first token", ttfts, options.ttft_slo_ms)
    _cumulative(tpot_axes, "Time per output token", tpots, options.tpot_slo_ms)
    _throughput(rate_axes, report)
    summary = report.summary
    figure.suptitle(
        f"{report.model}: rate {options.rate:g}, {summary.completed} of {summary.requests} completed, "
        f"{summary.output_tokens_per_second:,.0f} output tokens/s",
        fontsize=11,
    )
    figure.savefig(path)


def _cumulative(axes: Axes, title: str, values_ms: list[float], objective_ms: float | None) -> None:
    """The share of requests at or below each value, with p50 and p99 marked, and the objective where there is one."""
    _frame(axes, title, "ms", "share of requests, %")
    axes.set_ylim(0, 102)
    if not values_ms:
        axes.text(0.5, 0.5, "no completed request", transform=axes.transAxes, ha="center", color=GREY)
        return
    ordered = np.sort(values_ms)
    axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered) * 100, where="post", color=BLUE, linewidth=1.8)
    for percent, face in ((50, "white"), (99, BLUE)):
        value = float(np.percentile(ordered, percent))
        label = f"p{percent}  {value:,.1f} ms"
        axes.plot(value, percent, "o", color=BLUE, markerfacecolor=face, markersize=6, linestyle="", label=label)
    if objective_ms is not None:
        within = float(np.mean(ordered <= objective_ms))
        label = f"objective {objective_ms:g} ms: {within:.0%}"
        axes.axvline(objective_ms, color=ORANGE, linestyle="--", linewidth=1.4, label=label)
    axes.set_xlim(left=0)
    axes.legend(fontsize=9, loc="best", framealpha=0.95, edgecolor="none")


def _throughput(axes: Axes, report: Report) -> None:
    """Output tokens a second as they arrived, with requests in flight on a second scale."""
    _frame(axes, "Throughput and load over time", "seconds", "output tokens/s")
    edges, rates = throughput_over_time(report.records, TIME_BINS)
    axes.stairs(rates, edges, fill=True, color=BLUE, alpha=0.25)
    axes.stairs(rates, edges, color=BLUE, linewidth=1.2)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(bottom=0)
    in_flight = axes.twinx()
    times, counts = _in_flight(report)
    in_flight.step(times, counts, where="post", color=ORANGE, linewidth=1.2)
    in_flight.set_ylabel("requests in flight", color=ORANGE)
    # The number of requests is whole.
    in_flight.yaxis.set_major_locator(MaxNLocator(integer=True))
    in_flight.set_ylim(0, max(max(counts), 1) * 1.25)
    in_flight.tick_params(axis="y", colors=ORANGE)
    in_flight.spines[["top", "left"]].set_visible(False)


def _in_flight(report: Report) -> tuple[list[float], list[int]]:
    """Requests scheduled and not yet ended, at each moment it changes. A failed request ends with its last message."""
    changes = [(record.scheduled_s, 1) for record in report.records]
    for record in report.records:
        last = record.message_times_s[-1] if record.message_times_s else record.scheduled_s
        changes.append((last if record.finished_s is None else record.finished_s, -1))
    changes.sort()
    return [time for time, _ in changes], np.cumsum([change for _, change in changes]).tolist()


def _frame(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=GREY, alpha=0.18)
    axes.spines[["top", "right"]].set_visible(False)
