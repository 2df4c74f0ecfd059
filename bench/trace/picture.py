"""A trace as a picture over time, with a row for each span below its parent's."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib import pyplot

from bench.trace.collector import Span

COLOURS = {
    "gateway": "#2563eb",
    "scheduler": "#7c3aed",
    "decode": "#059669",
    "prefill": "#d97706",
    "rank": "#64748b",
    "kvstore": "#dc2626",
}


def draw(spans: Sequence[Span], path: Path) -> None:
    rows = list(_rows(spans))
    began = min(span.start_ns for span in spans)
    whole = max(span.end_ns for span in spans) - began
    figure, axes = pyplot.subplots(figsize=(11, 0.27 * len(rows) + 0.9))
    for place, (depth, span) in enumerate(rows):
        start = (span.start_ns - began) / 1e6
        length = max(span.end_ns - span.start_ns, whole / 500) / 1e6
        axes.barh(place, length, left=start, height=0.7, color=COLOURS.get(span.service, "#000000"))
        label = f"{'   ' * depth}{span.name}  ({span.service})"
        axes.text(-0.36, place, label, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_xlim(0, whole / 1e6 * 1.01)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xlabel("ms since the gateway took the request")
    axes.grid(axis="x", alpha=0.3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", dpi=110)
    pyplot.close(figure)


def _rows(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with its depth, after its parent, siblings in the order of their starts."""
    known = {span.span_id for span in spans}

    def below(parent: bytes | None, depth: int) -> Iterator[tuple[int, Span]]:
        here = [each for each in spans if (each.parent_id if each.parent_id in known else None) == parent]
        for span in sorted(here, key=lambda each: each.start_ns):
            yield depth, span
            yield from below(span.span_id, depth + 1)

    return below(None, 0)
