"""Confidence intervals of scores, and tests of whether two scores differ. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, erfc, sqrt
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def wilson(successes: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """The score interval of a share (Wilson, 1927). Unlike share +- z s, it is sound for few trials and near 0 and 1.

    Without trials it is [0, 1].
    """
    assert 0 <= successes <= total
    if total == 0:
        return Interval(0.0, 1.0)
    z = _quantile(confidence)
    share = successes / total
    scale = 1 + z * z / total
    middle = (share + z * z / (2 * total)) / scale
    half = z / scale * sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p that two solvers of the same problems are equally good (McNemar, 1947).

    The first alone solved `only_first` problems, the second alone `only_second`. Other problems carry no information.
    """
    differing = only_first + only_second
    fewer = min(only_first, only_second)
    tail = sum(comb(differing, count) for count in range(fewer + 1))
    probability: float = 2 * tail / 2**differing
    return min(1.0, probability)


def two_proportions(first: int, first_total: int, second: int, second_total: int) -> float:
    """Two-sided p that two shares over different problems are equal: the pooled z test."""
    assert first_total > 0
    assert second_total > 0
    pooled = (first + second) / (first_total + second_total)
    variance = pooled * (1 - pooled) * (1 / first_total + 1 / second_total)
    if variance == 0:
        return 1.0
    return _two_sided((first / first_total - second / second_total) / sqrt(variance))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values, raised so that all of them together err as rarely as a single one would (Holm, 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The interval of the mean of at least two independent values, by the normal approximation."""
    half = _quantile(confidence) * stdev(values) / sqrt(len(values))
    return Interval(fmean(values) - half, fmean(values) + half)


def mean_is_zero(values: Sequence[float]) -> float:
    """Two-sided p that at least two independent values have the mean 0, by the normal approximation."""
    deviation = stdev(values) / sqrt(len(values))
    if deviation == 0:
        return 1.0 if fmean(values) == 0 else 0.0
    return _two_sided(fmean(values) / deviation)


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _two_sided(z: float) -> float:
    return erfc(abs(z) / sqrt(2))
