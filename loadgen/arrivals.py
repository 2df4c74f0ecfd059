"""When requests arrive: a Poisson process, fixed before the run starts."""

import math

import numpy as np


def arrival_times(rate: float, generator: np.random.Generator, *, count: int) -> list[float]:
    """`count` arrivals, in seconds from the start, the first at 0. With an infinite rate all are at 0."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = generator.exponential(1 / rate, size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def arrival_times_within(rate: float, generator: np.random.Generator, *, duration_s: float) -> list[float]:
    """Arrivals in [0, duration_s), seconds from the start, the first at 0."""
    assert math.isfinite(rate)
    times = [0.0]
    while (following := times[-1] + generator.exponential(1 / rate)) < duration_s:
        times.append(following)
    return times
