"""Fits lines to measured points, and says how far a fit is off. Pure."""

from collections.abc import Sequence

import numpy as np

from mesh.costs import CostModel

# Least time of a token, so that a cost model's tokens a second are finite.
SMALLEST_TOKEN_MS = 1e-6

Points = Sequence[tuple[float, float]]


def left_out_error(points: Points) -> float | None:
    """Largest relative difference between a measured step and the line through the others; None below three points."""
    differences = []
    for index in range(1, len(points) - 1):
        requests, ms = points[index]
        others = tuple(point for position, point in enumerate(points) if position != index)
        differences.append(abs(CostModel(decode_steps=others).decode_ms(requests) / ms - 1))
    return max(differences, default=None)


def prompt_times(points: Points) -> tuple[float, float, float]:
    """Split times to the first token into three terms, in milliseconds: one for each prompt, one for each of its
    tokens, and one for each pair of a token and an earlier one (attention to earlier tokens grows with the pairs).

    points: the prompts' lengths in tokens and their times to the first token in milliseconds. The terms minimize the
    squares of the relative errors. A term that noise would make negative is 0; a token's time is always above 0.
    """
    tokens = np.array([at for at, _ in points])
    ms = np.array([took for _, took in points])
    terms = np.stack([np.ones_like(tokens), tokens, tokens**2 / 2], axis=1)
    kept = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, kept] / ms[:, None], np.ones_like(ms), rcond=None)
        if found.min() >= 0 or len(kept) == 1:
            break
        del kept[int(found.argmin())]
    start, token, pair = (dict(zip(kept, found.tolist(), strict=True)).get(term, 0.0) for term in range(3))
    return start, max(token, SMALLEST_TOKEN_MS), pair
