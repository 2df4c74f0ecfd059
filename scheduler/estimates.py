"""How fast each worker is taken to be: as it measured, and the more as the others did the longer ago that was. Pure.

A worker that measured slow once gets less to do, and so nothing to measure by which it could correct that. What it
measured therefore loses half of its weight every few seconds, in favour of what the workers that do measure find: in
time it is taken to be like them, is given some work again, and says anew how fast it is. The true difference of a slow
worker costs a few requests each time. Rates and times span orders of magnitude, so their logarithms are what is
averaged: then it does not matter which of the two is measured.
"""

from collections.abc import Iterable
from math import exp, fsum, log

import msgspec

from mesh.domain.workers import WorkerLoad
from scheduler.candidates import Candidates, CandidateWorker, Pace, PlacementKnobs

# Long beside the time between two status messages, so that a worker with work to do is believed. Short enough that one
# thought ten times slower than it is, beside another with twenty requests (1.4 times an idle one's step), is given
# something after a dozen seconds; one that is truly ten times slower gets one request in a hundred for it.
HALF_LIFE_SECONDS = 3.0
# The configured constant counts like one worker that measured so long ago: not beside any fresh measurement, and more
# than what nobody has found again since.
CONSTANT_AGE_SECONDS = 60.0


def informed(candidates: Candidates, knobs: PlacementKnobs) -> Candidates:
    """The candidates with an estimate beside their measurements."""
    workers = (*candidates.decode, *candidates.prefill)
    prefill = Estimator(
        ((each.load.prefill_tokens_per_second, each.ages.prefill) for each in workers), knobs.prefill_tokens_per_second
    )
    step = Estimator(
        ((_single_step_ms(each.load, knobs), each.ages.step) for each in candidates.decode), knobs.decode_step_ms
    )
    fetch = Estimator(
        ((each.fetch_bytes_per_second, each.ages.fetch) for each in workers), knobs.fetch_bytes_per_second
    )
    push = Estimator(
        ((each.load.push_bytes_per_second, each.ages.push) for each in candidates.prefill), knobs.push_bytes_per_second
    )

    def estimated(worker: CandidateWorker) -> CandidateWorker:
        load, ages = worker.load, worker.ages
        pace = Pace(
            prefill_tokens_per_second=prefill.estimate(load.prefill_tokens_per_second, ages.prefill),
            decode_step_ms=step.estimate(_single_step_ms(load, knobs), ages.step),
            push_bytes_per_second=push.estimate(load.push_bytes_per_second, ages.push),
            fetch_bytes_per_second=fetch.estimate(worker.fetch_bytes_per_second, ages.fetch),
        )
        return msgspec.structs.replace(worker, estimate=pace)

    return Candidates(
        [estimated(worker) for worker in candidates.decode],
        [estimated(worker) for worker in candidates.prefill],
        candidates.stores,
    )


class Estimator:
    """One quantity, from what all workers measured of it, each with its age in seconds; None if it measured nothing."""

    def __init__(self, measured: Iterable[tuple[float | None, float]], constant: float) -> None:
        known = [(_weight(age_seconds), log(value / constant)) for value, age_seconds in measured if value]
        # Sums in which the order of workers makes no difference, not even in the last bit.
        weights = fsum([_weight(CONSTANT_AGE_SECONDS), *(weight for weight, _ in known)])
        # What they measured in the mean.
        self._common = constant * exp(fsum(weight * logarithm for weight, logarithm in known) / weights)

    def estimate(self, value: float | None, age_seconds: float) -> float:
        """Of the worker that measured this; a fresh value is believed, and an old one gives way to the mean."""
        return value * (self._common / value) ** (1.0 - _weight(age_seconds)) if value else self._common


def _single_step_ms(load: WorkerLoad, knobs: PlacementKnobs) -> float | None:
    """What was measured, as it would have been with one request in the batch; None if nothing was."""
    if load.decode_step_ms is None:
        return None
    requests = max(1.0, load.decode_step_requests or 0.0)
    return load.decode_step_ms * (1 + knobs.step_growth) / (1 + knobs.step_growth * requests)


def _weight(age_seconds: float) -> float:
    """1 for a fresh measurement."""
    return float(0.5 ** (age_seconds / HALF_LIFE_SECONDS))
