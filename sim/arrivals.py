"""When requests come."""

from collections.abc import Iterator
from math import cos, pi

import numpy as np

from sim.workload import ArrivalConfig


def arrival_times(config: ArrivalConfig, seconds: float, generator: np.random.Generator) -> Iterator[float]:
    """Times below `seconds`, ascending. They are drawn at the highest rate, and some are dropped when it is lower."""
    now, highest = 0.0, max((spike.factor for spike in config.spikes), default=1.0)
    while True:
        now += gap(config, generator) / highest
        if now >= seconds:
            return
        share = rate_share(config, now) / highest
        if share >= 1 or generator.random() < share:
            yield now


def rate_share(config: ArrivalConfig, seconds: float) -> float:
    """The rate at this time, relative to `per_second`. If spikes overlap, the highest one counts."""
    day = 1.0 if config.day_seconds is None else day_share(seconds, config.day_seconds, config.night)
    now = (spike.factor for spike in config.spikes if spike.at <= seconds < spike.at + spike.seconds)
    return day * max(now, default=1.0)


def gap(config: ArrivalConfig, generator: np.random.Generator) -> float:
    """Seconds until the next arrival at the rate `per_second`."""
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
