"""From measured points to a line through them, and how far that is off. Pure."""

from collections.abc import Sequence

import numpy as np

from mesh.costs import CostModel

# A cost model's rate of tokens is finite.
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
    """First tokens of prompts of several lengths, in milliseconds: of any prompt, of each of its tokens, and of each
    pair of a token and one before it.

    The least squares' of non-negative terms, relative errors weighed alike: attention to earlier tokens grows with the
    pairs, and a term that noise would make negative is none. A token's time is above 0.
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
