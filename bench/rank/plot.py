"""The picture of a rank's decode steps: their times and the floor's, and the kernels that they consist of."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench.rank.measure import Report

BLUE, ORANGE, GREY = "#2563eb", "#d97706", "#6b7280"
SHOWN_GROUPS = 8


def save(report: Report, path: Path) -> None:
    """Write a PNG of two panels."""
    figure = Figure(figsize=(12, 4.5), dpi=130, layout="constrained")
    steps, parts = figure.subplots(1, 2)
    requests = [row.requests for row in report.decode]
    steps.plot(requests, [row.step_ms for row in report.decode], "o-", color=BLUE, label="measured")
    steps.plot(requests, [row.floor_ms for row in report.decode], "o--", color=ORANGE, label="floor")
    sustained = [row.sustained_floor_ms for row in report.decode]
    steps.plot(requests, sustained, ":", color=ORANGE, label="floor at sustained rates")
    for row in report.decode:
        steps.annotate(f"{row.ratio:.2f}", (row.requests, row.step_ms), textcoords="offset points", xytext=(0, 7))
    steps.set(xlabel="requests", ylabel="ms a step", ylim=(0, None), title="Decode step, and its ratio to the floor")
    largest = max(report.decode, key=lambda row: row.requests)
    names = list(largest.breakdown)[:SHOWN_GROUPS]
    bottom = np.zeros(len(report.decode))
    for name in names:
        heights = np.array([row.breakdown.get(name, 0.0) / 1000 for row in report.decode])
        parts.bar([str(count) for count in requests], heights, bottom=bottom, label=name[:32])
        bottom += heights
    parts.set(xlabel="requests", ylabel="ms on the device", title="Kernels of a step")
    for axes in (steps, parts):
        axes.grid(color=GREY, alpha=0.18)
        axes.legend(fontsize=8)
    forms = f"{report.experts} experts, {report.kv} KV"
    figure.suptitle(f"{report.shape}: {report.layers} layers, {forms}, one {report.device}", fontsize=11)
    figure.savefig(path)
