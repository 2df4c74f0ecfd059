"""When requests come."""

from collections.abc import Iterator
from math import cos, pi

import numpy as np

from sim.workload import ArrivalConfig


def arrival_times(config: ArrivalConfig, seconds: float, generator: np.random.Generator) -> Iterator[float]:
    """Times below `seconds`, ascending. A daily curve thins out arrivals at the highest rate."""
    now = 0.0
    while True:
        now += gap(config, generator)
        if now >= seconds:
            return
        if config.day_seconds is None or generator.random() < day_share(now, config.day_seconds, config.night):
            yield now


def gap(config: ArrivalConfig, generator: np.random.Generator) -> float:
    """Until the next arrival, at the highest rate."""
    mean = 1 / config.per_second
    match config.kind:
        case "poisson":
            return float(generator.exponential(mean))
        case "bursty":
            # A gamma distribution with this mean and variance.
            return float(generator.gamma(1 / config.burstiness, mean * config.burstiness))
        case "steady":
            return mean


def day_share(seconds: float, day_seconds: float, night: float) -> float:
    """The rate at this time of the day, relative to the highest: `night` at midnight, 1 at noon."""
    return night + (1 - night) * (1 - cos(2 * pi * seconds / day_seconds)) / 2
