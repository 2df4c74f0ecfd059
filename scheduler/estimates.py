"""How fast each worker is estimated to be: its own measurement while fresh, the mean of all workers' as it ages. Pure.

A worker that measured slow once gets less work, and so no occasion to measure again. Its measurement therefore loses
half of its weight every few seconds, in favour of what the others of its class measure: workers with the same card and
the same layout. In time it is estimated like them, is given some work again, and measures anew. A worker that is truly
slower than its class costs a few requests each time; a slower class does so once a minute at most. A class that has
measured nothing is taken to be like the others. Rates and times span orders of magnitude, so the mean is taken of their
logarithms: it is then the same for a rate and for its inverse.
"""

from collections.abc import Iterable, Sequence
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
    prefill = Estimator(map(_prefill_rate, workers), costs.prefill_tokens_per_second)
    step = Estimator((_step_time(each, costs) for each in candidates.decode), costs.decode_ms(1))
    fetch = Estimator(map(_fetch_rate, workers), costs.fetch_bytes_per_second)
    push = Estimator(map(_push_rate, candidates.prefill), costs.push_bytes_per_second)

    def estimated(worker: CandidateWorker) -> CandidateWorker:
        pace = Pace(
            prefill_tokens_per_second=prefill.estimate(_prefill_rate(worker)),
            decode_step_ms=step.estimate(_step_time(worker, costs)),
            push_bytes_per_second=push.estimate(_push_rate(worker)),
            fetch_bytes_per_second=fetch.estimate(_fetch_rate(worker)),
        )
        return msgspec.structs.replace(worker, estimate=pace)

    return Candidates(
        [estimated(worker) for worker in candidates.decode],
        [estimated(worker) for worker in candidates.prefill],
        candidates.stores,
    )


class Measured(msgspec.Struct, frozen=True):
    """What one worker measured of a quantity."""

    worker_class: str
    # None if it has not.
    value: float | None
    age_seconds: float


class Estimator:
    """Estimates of one quantity from what all workers measured."""

    def __init__(self, measured: Iterable[Measured], constant: float) -> None:
        known: dict[str, list[Measured]] = {}
        for each in measured:
            if each.value:
                known.setdefault(each.worker_class, []).append(each)
        self._everyone = _mean([each for classmates in known.values() for each in classmates], constant)
        self._classes = {name: _mean(classmates, self._everyone) for name, classmates in known.items()}

    def estimate(self, measured: Measured) -> float:
        """For the worker that measured this: a fresh value counts in full, and an old one gives way to the mean."""
        common, value = self._classes.get(measured.worker_class, self._everyone), measured.value
        return value * (common / value) ** (1.0 - _weight(measured.age_seconds)) if value else common


def _mean(measured: Sequence[Measured], constant: float) -> float:
    """The geometric mean of the measurements that have a value, and of a constant that counts little."""
    weights = [_weight(each.age_seconds) for each in measured]
    logarithms = [log(each.value / constant) for each in measured if each.value]
    # Exact sums, so that the order of the workers makes no difference, not even in the last bit.
    total = fsum([_weight(CONSTANT_AGE_SECONDS), *weights])
    return constant * exp(fsum(weight * each for weight, each in zip(weights, logarithms, strict=True)) / total)


def _prefill_rate(worker: CandidateWorker) -> Measured:
    return Measured(worker.worker_class, worker.load.prefill_tokens_per_second, worker.ages.prefill)


def _step_time(worker: CandidateWorker, costs: CostModel) -> Measured:
    """How long the worker's step takes for a batch of one request, as it measured."""
    return Measured(worker.worker_class, _single_step_ms(worker.load, costs), worker.ages.step)


def _fetch_rate(worker: CandidateWorker) -> Measured:
    return Measured(worker.worker_class, worker.fetch_bytes_per_second, worker.ages.fetch)


def _push_rate(worker: CandidateWorker) -> Measured:
    return Measured(worker.worker_class, worker.load.push_bytes_per_second, worker.ages.push)


def _single_step_ms(load: WorkerLoad, costs: CostModel) -> float | None:
    """The measured step time, converted to a batch of one request; None if there is none."""
    if load.decode_step_ms is None:
        return None
    requests = max(1.0, load.decode_step_requests or 0.0)
    return load.decode_step_ms * costs.decode_ms(1) / costs.decode_ms(requests)


def _weight(age_seconds: float) -> float:
    """1 for a fresh measurement, 0 for an infinitely old one."""
    return float(0.5 ** (age_seconds / HALF_LIFE_SECONDS))
