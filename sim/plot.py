"""The picture of simulations: goodput by setting, how latencies are distributed, and where workers' time went."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.summary import Objectives
from sim.sweep import Point

BLUE, ORANGE, GREY, GREEN = "#2563eb", "#d97706", "#6b7280", "#059669"
MOST_LABELS = 24


def save_plot(points: Sequence[Point], objectives: Objectives, path: Path) -> None:
    """Write a PNG of three panels, for one result or many."""
    figure = Figure(figsize=(15, 4.5), dpi=130, layout="constrained")
    goodput, latency, use = figure.subplots(1, 3)
    _goodput(goodput, points)
    _latency(latency, points, objectives)
    if len(points) == 1:
        _replicas(use, points[0])
    else:
        _use(use, points)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the time and the version that matplotlib writes by default, equal results give equal bytes.
    figure.savefig(path, metadata={"Software": None})


def _goodput(axes: Axes, points: Sequence[Point]) -> None:
    _frame(axes, "Goodput", "requests/s offered", "requests/s that kept the objectives")
    offered = [point.result.summary.requests / max(point.result.summary.elapsed_s, 1e-9) for point in points]
    good = [point.result.summary.goodput.requests_per_second for point in points]
    axes.plot(offered, good, "o", color=BLUE, markersize=5)
    most = max([*offered, 1e-9])
    axes.plot([0, most], [0, most], color=GREY, linewidth=1, linestyle="--")
    for point, across, up in list(zip(points, offered, good, strict=True))[:MOST_LABELS]:
        axes.annotate(_label(point), (across, up), fontsize=6, textcoords="offset points", xytext=(4, -6))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _latency(axes: Axes, points: Sequence[Point], objectives: Objectives) -> None:
    _frame(axes, "Latency: p50 to p99", "", "ms")
    axes.set_yscale("log")
    places = np.arange(len(points))
    for offset, colour, name in ((-0.15, BLUE, "ttft_ms"), (0.15, ORANGE, "tpot_ms")):
        for place, point in zip(places, points, strict=True):
            found = getattr(point.result.summary, name)
            if found is not None:
                axes.vlines(place + offset, max(found.p50, 1e-3), max(found.p99, 1e-3), color=colour, linewidth=3)
                axes.plot(place + offset, max(found.p50, 1e-3), "o", color=colour, markersize=4)
    for limit, colour, name in ((objectives.ttft_ms, BLUE, "TTFT"), (objectives.tpot_ms, ORANGE, "TPOT")):
        axes.plot([], [], color=colour, linewidth=3, label=name)
        if limit is not None:
            axes.axhline(limit, color=colour, linestyle="--", linewidth=1)
    axes.set_xticks(places, [_label(point) for point in points], rotation=60, ha="right", fontsize=6)
    axes.legend(fontsize=8)


def _use(axes: Axes, points: Sequence[Point]) -> None:
    _frame(axes, "Share of the time that devices computed", "", "%")
    places = np.arange(len(points))
    for offset, colour, role in ((-0.2, GREEN, "prefill"), (0.2, BLUE, "decode")):
        shares = [100 * point.result.roles[role].busy if role in point.result.roles else 0.0 for point in points]
        axes.bar(places + offset, shares, width=0.4, color=colour, label=role)
    axes.set_xticks(places, [_label(point) for point in points], rotation=60, ha="right", fontsize=6)
    axes.legend(fontsize=8)


def _replicas(axes: Axes, point: Point) -> None:
    _frame(axes, "Workers that live", "seconds", "workers")
    for colour, role in ((GREEN, "prefill"), (BLUE, "decode")):
        changes = point.result.replicas[role]
        times = [time for time, _ in changes] + [point.result.seconds]
        counts = [count for _, count in changes]
        axes.step(times, [*counts, *counts[-1:]] or [0], where="post", color=colour, label=role)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _label(point: Point) -> str:
    return " ".join(setting.rpartition(".")[2] for setting in point.settings)


def _frame(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=GREY, alpha=0.18)
    axes.spines[["top", "right"]].set_visible(False)
