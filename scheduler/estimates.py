"""How fast each worker is estimated to be: its own measurement while fresh, the mean of all workers' as it ages. Pure.

A worker that measured slow once gets less work, and so no occasion to measure again. Its measurement therefore loses
half of its weight every few seconds, in favour of what the other workers measure. In time it is estimated like them,
is given some work again, and measures anew. A worker that is truly slow costs a few requests each time. Rates and times
span orders of magnitude, so the mean is taken of their logarithms: it is then the same for a rate and for its inverse.
"""

from collections.abc import Iterable
from math import exp, fsum, log

import msgspec

from mesh.costs import CostModel
from mesh.domain.workers import WorkerLoad
from scheduler.candidates import Candidates, CandidateWorker, Pace, PlacementKnobs

# Long compared with the time between two status messages, so that the measurements of a busy worker count in full.
# Short enough that a worker which seems ten times slower than it is, next to one with twenty requests (whose step takes
# 1.4 times an idle worker's), gets work after a dozen seconds. A worker that is truly ten times slower gets one request
# in a hundred because of it.
HALF_LIFE_SECONDS = 3.0
# The configured constant counts like a measurement of this age: it hardly matters next to a fresh measurement, and it
# outweighs measurements that are older.
CONSTANT_AGE_SECONDS = 60.0


def informed(candidates: Candidates, knobs: PlacementKnobs) -> Candidates:
    """The candidates with an estimate beside their measurements."""
    workers, costs = (*candidates.decode, *candidates.prefill), knobs.costs
    prefill = Estimator(
        ((each.load.prefill_tokens_per_second, each.ages.prefill) for each in workers),
        costs.prefill_tokens_per_second,
    )
    step = Estimator(
        ((_single_step_ms(each.load, costs), each.ages.step) for each in candidates.decode), costs.decode_ms(1)
    )
    fetch = Estimator(
        ((each.fetch_bytes_per_second, each.ages.fetch) for each in workers), costs.fetch_bytes_per_second
    )
    push = Estimator(
        ((each.load.push_bytes_per_second, each.ages.push) for each in candidates.prefill), costs.push_bytes_per_second
    )

    def estimated(worker: CandidateWorker) -> CandidateWorker:
        load, ages = worker.load, worker.ages
        pace = Pace(
            prefill_tokens_per_second=prefill.estimate(load.prefill_tokens_per_second, ages.prefill),
            decode_step_ms=step.estimate(_single_step_ms(load, costs), ages.step),
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
    """Estimates of one quantity from all workers' measurements: (value or None, age in seconds)."""

    def __init__(self, measured: Iterable[tuple[float | None, float]], constant: float) -> None:
        known = [(_weight(age_seconds), log(value / constant)) for value, age_seconds in measured if value]
        # Exact sums, so that the order of the workers makes no difference, not even in the last bit.
        weights = fsum([_weight(CONSTANT_AGE_SECONDS), *(weight for weight, _ in known)])
        # The mean of all measurements.
        self._common = constant * exp(fsum(weight * logarithm for weight, logarithm in known) / weights)

    def estimate(self, value: float | None, age_seconds: float) -> float:
        """For the worker that measured `value`: a fresh value counts in full, and an old one gives way to the mean."""
        return value * (self._common / value) ** (1.0 - _weight(age_seconds)) if value else self._common


def _single_step_ms(load: WorkerLoad, costs: CostModel) -> float | None:
    """The measured step time, converted to a batch of one request; None if there is none."""
    if load.decode_step_ms is None:
        return None
    requests = max(1.0, load.decode_step_requests or 0.0)
    return load.decode_step_ms * costs.decode_ms(1) / costs.decode_ms(requests)


def _weight(age_seconds: float) -> float:
    """1 for a fresh measurement, 0 for an infinitely old one."""
    return float(0.5 ** (age_seconds / HALF_LIFE_SECONDS))
