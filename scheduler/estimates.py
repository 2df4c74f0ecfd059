"""How fast each worker is estimated to be: its own measurement while fresh, the mean of all workers' as it ages. Pure.

A worker that measured slow once gets less work, and so no occasion to measure again. Its measurement therefore loses
half of its weight every few seconds, in favour of what the others of its class measure: workers with the same card and
the same layout. In time it is estimated like them, is given some work again, and measures anew. A worker that is truly
slower than its class costs a few requests each time; a slower class does so once a minute at most. A class that has
measured nothing is taken to be like the others. Rates and times span orders of magnitude, so the mean is taken of their
logarithms: it is then the same for a rate and for its inverse.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress, repeat
from math import exp, exp2, fsum, log
from operator import mul
from typing import TypeAlias

import msgspec

from mesh.costs import CostModel
from mesh.domain.workers import WorkerLoad
from scheduler.candidates import Candidates, Pace, PlacementKnobs

# Long compared with the time between two status messages, so that the measurements of a busy worker count in full.
# Short enough that a worker which seems ten times slower than it is, next to one with twenty requests (whose step takes
# 1.4 times an idle worker's), gets work after a dozen seconds. A worker that is truly ten times slower gets one request
# in a hundred because of it.
HALF_LIFE_SECONDS = 3.0
# The configured constant counts like a measurement of this age: it hardly matters next to a fresh measurement, and it
# outweighs measurements that are older.
CONSTANT_AGE_SECONDS = 60.0
ASSUMED_WEIGHT = 0.5 ** (CONSTANT_AGE_SECONDS / HALF_LIFE_SECONDS)
# What one worker measured of a quantity: its class, the value (None if it has none), and the value's age in seconds.
Measured: TypeAlias = tuple[str, float | None, float]


def informed(candidates: Candidates, knobs: PlacementKnobs) -> Candidates:
    """The candidates with an estimate beside their measurements.

    Nobody asks for a decode worker's pushes or a prefill worker's steps, which are the constants.
    """
    workers, costs, now = (*candidates.decode, *candidates.prefill), knobs.costs, candidates.now
    decodes, prefills, single_ms = len(candidates.decode), len(candidates.prefill), costs.decode_ms(1)
    prefill = estimates(
        [(each.worker_class, each.load.prefill_tokens_per_second, now - each.measured_at.prefill) for each in workers],
        costs.prefill_tokens_per_second,
    )
    fetch = estimates(
        [(each.worker_class, each.fetch_bytes_per_second, now - each.measured_at.fetch) for each in workers],
        costs.fetch_bytes_per_second,
    )
    # Few prompts are on a disk, and this is asked for each.
    disk_fetch: Iterable[float] = repeat(costs.disk_fetch_bytes_per_second)
    if any(store.disk_blocks for store in candidates.stores.values()):
        disk_fetch = estimates(
            [
                (each.worker_class, each.disk_fetch_bytes_per_second, now - each.measured_at.disk_fetch)
                for each in workers
            ],
            costs.disk_fetch_bytes_per_second,
        )
    step = estimates(
        [
            (each.worker_class, _single_step_ms(each.load, costs, single_ms), now - each.measured_at.step)
            for each in candidates.decode
        ],
        single_ms,
    )
    push = estimates(
        [
            (each.worker_class, each.load.push_bytes_per_second, now - each.measured_at.push)
            for each in candidates.prefill
        ],
        costs.push_bytes_per_second,
    )
    steps = [*step, *repeat(single_ms, prefills)]
    pushes = [*repeat(costs.push_bytes_per_second, decodes), *push]
    estimated = [
        msgspec.structs.replace(worker, estimate=pace)
        for worker, pace in zip(workers, map(Pace, prefill, steps, pushes, fetch, disk_fetch), strict=True)
    ]
    return replace(candidates, decode=estimated[:decodes], prefill=estimated[decodes:])


def estimates(measured: Sequence[Measured], constant: float) -> list[float]:
    """Of one quantity, for each worker from what all measured: a fresh value counts in full, an old one gives way."""
    classes, values, ages = zip(*measured, strict=True) if measured else ((), (), ())
    if not any(values):
        return [constant] * len(measured)
    # 1 for a fresh measurement, 0 for an infinitely old one.
    weights = [exp2(-age / HALF_LIFE_SECONDS) if value else 0.0 for value, age in zip(values, ages, strict=True)]
    logarithms = [log(value / constant) if value else 0.0 for value in values]
    weighted = [*map(mul, weights, logarithms)]
    everyone = _mean(weights, weighted, 0.0)
    means = {name: _mean(*_of_class(name, classes, weights, weighted), everyone) for name in set(classes)}
    return [
        value * exp((1.0 - weight) * (means[name] - logarithm)) if value else constant * exp(means[name])
        for name, value, weight, logarithm in zip(classes, values, weights, logarithms, strict=True)
    ]


def _of_class(
    name: str, classes: Sequence[str], weights: list[float], weighted: list[float]
) -> tuple[list[float], list[float]]:
    """What the workers of that class contribute."""
    if classes.count(name) == len(classes):
        return weights, weighted
    mine = [each == name for each in classes]
    return [*compress(weights, mine)], [*compress(weighted, mine)]


def _mean(weights: Sequence[float], weighted: Sequence[float], assumed: float) -> float:
    """The weighted mean of what was measured and of an assumption that counts little."""
    # Exact sums, so that the order of the workers makes no difference, not even in the last bit.
    return fsum([ASSUMED_WEIGHT * assumed, *weighted]) / fsum([ASSUMED_WEIGHT, *weights])


def _single_step_ms(load: WorkerLoad, costs: CostModel, single_ms: float) -> float | None:
    """The measured step time, converted to a batch of one request; None if there is none."""
    if load.decode_step_ms is None:
        return None
    return load.decode_step_ms * single_ms / costs.decode_ms(max(1.0, load.decode_step_requests or 0.0))
