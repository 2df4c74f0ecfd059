"""The picture of meshes under the same loads: good requests, times per token, and how evenly tokens come."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from bench.rank.plot import BLUE, GREY, ORANGE

COLOURS = (BLUE, ORANGE, "#059669", "#7c3aed")


@dataclass(frozen=True)
class Point:
    """A mesh under one load.

    rate: requests a second that arrive; good: the share of them that are good; tpot_ms: the median time per token;
    evenness: the p99 of the times between messages, divided by their median.
    """

    mesh: str
    rate: float
    good: float
    tpot_ms: float
    evenness: float


def plot(points: Sequence[Point], bound_ms: float, path: Path) -> None:
    """Write a PNG of three panels. bound_ms: the longest time per token of a good request."""
    figure = Figure(figsize=(13, 4), dpi=130, layout="constrained")
    good, times, evenness = figure.subplots(1, 3)
    rates = sorted({point.rate for point in points})
    for colour, mesh in zip(COLOURS, dict.fromkeys(point.mesh for point in points), strict=False):
        own = sorted((point for point in points if point.mesh == mesh), key=lambda point: point.rate)
        at = [point.rate for point in own]
        good.plot(at, [point.good * point.rate for point in own], "o-", color=colour, label=mesh)
        times.plot(at, [point.tpot_ms for point in own], "o-", color=colour, label=mesh)
        evenness.plot(at, [point.evenness for point in own], "o-", color=colour, label=mesh)
    good.plot(rates, rates, ":", color=GREY, label="all of them")
    times.axhline(bound_ms, linestyle=":", color=GREY, label="bound")
    good.set(ylabel="good requests a second")
    times.set(ylabel="ms a token, median")
    evenness.set(ylabel="ITL, p99 over median")
    for axes in (good, times, evenness):
        axes.set(xlabel="requests a second", ylim=(0, None))
        axes.grid(color=GREY, alpha=0.18)
        axes.legend(fontsize=8)
    figure.savefig(path)
