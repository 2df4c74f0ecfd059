"""From measured points to a line through them, and how far that is off. Pure."""

from collections.abc import Sequence

import numpy as np

from mesh.costs import CostModel

Points = Sequence[tuple[float, float]]


def left_out_error(points: Points) -> float | None:
    """Largest relative difference between a measured step and the line through the others; None below three points."""
    differences = []
    for index in range(1, len(points) - 1):
        requests, ms = points[index]
        others = tuple(point for position, point in enumerate(points) if position != index)
        differences.append(abs(CostModel(decode_steps=others).decode_ms(requests) / ms - 1))
    return max(differences, default=None)


def straight_line(points: Points) -> tuple[float, float]:
    """Value at 0 and slope of the least squares' line, relative errors weighed alike."""
    across = np.array([x for x, _ in points])
    up = np.array([y for _, y in points])
    slope, start = np.polyfit(across, up, 1, w=1 / up)
    return float(start), float(slope)
