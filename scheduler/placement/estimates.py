"""Estimates how fast each worker is: by its own measurement while that is fresh, and increasingly by all workers' mean
as it ages. Pure.

A worker that measured slow once gets less work, and so no occasion to measure again. Its measurement therefore loses
half of its weight every few seconds, in favour of what the others of its class measure: workers with the same card and
the same layout. In time it is estimated like them, is given some work again, and measures again. A worker that is truly
slower than its class costs a few requests each time; a slower class does so once a minute at most. Once all that its
class has measured is old, a worker is estimated by what it measured before it served; one that measured nothing then
is estimated like the other classes. Rates and times span orders of magnitude, so the mean is taken of their logarithms:
it is then consistent for a rate and its inverse.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
from math import exp, exp2, fsum, log
from operator import mul

from mesh.costs import CostModel
from mesh.domain.workers import PromptPace, TransferCounters, WorkerLoad, WorkerSpeed
from scheduler.placement.candidates import Candidates, CandidateWorker, Measured, MeasurementTimes, Measures, Pace
from scheduler.placement.constants import Constants

# Long compared with the time between two status messages, so that the measurements of a busy worker count in full.
# Short enough that a worker that seems ten times slower than it is gets work after a dozen seconds next to a worker
# with twenty requests (whose step takes 1.4 times an idle worker's). A worker that is truly ten times slower gets one
# request in a hundred because of it.
HALF_LIFE_SECONDS = 3.0
# What a worker measured before it served, or else the configured constant, counts like a measurement of this age: it
# hardly matters next to a fresh measurement, and it outweighs measurements that are older.
CONSTANT_AGE_SECONDS = 60.0
ASSUMED_WEIGHT: float = 0.5 ** (CONSTANT_AGE_SECONDS / HALF_LIFE_SECONDS)
# The time of a measurement that does not exist.
NEVER = float("-inf")


def paces(candidates: Candidates, constants: Constants) -> tuple[list[Pace], list[Pace]]:
    """The estimated pace of each decode worker and each prefill worker, in the order of the candidates.

    Paces that placement does not need are the constants: a decode worker's pushes, a prefill worker's steps, and
    fetches if no store holds anything.
    """
    workers, costs, now = (*candidates.decode, *candidates.prefill), constants.costs, candidates.now
    decodes, classes = len(candidates.decode), [each.identity.worker_class for each in workers]
    known = [each.measures or _measures(each, costs) for each in workers]
    prompts = estimates(classes, [each.prompts for each in known], now)
    sparse = prompts
    if any(each.identity.sparse_prefill is not None for each in workers):
        sparse = [*map(mul, prompts, estimates(classes, [each.sparse_gain for each in known], now))]
    steps = estimates(classes[:decodes], [each.step for each in known[:decodes]], now)
    pushes = estimates(classes[decodes:], [each.push for each in known[decodes:]], now)
    fetch: Iterable[float] = repeat(costs.fetch_bytes_per_second)
    if candidates.stores:
        fetch = estimates(classes, [each.fetch for each in known], now)
    disk_fetch: Iterable[float] = repeat(costs.disk_fetch_bytes_per_second)
    if any(store.disk_blocks for store in candidates.stores.values()):
        disk_fetch = estimates(classes, [each.disk_fetch for each in known], now)
    both = chain(steps, repeat(1.0)), chain(repeat(costs.push_bytes_per_second, decodes), pushes)
    found = [*map(Pace, prompts, sparse, *both, fetch, disk_fetch)]
    return found[:decodes], found[decodes:]


def measures(
    load: WorkerLoad,
    transfers: TransferCounters,
    measured_at: MeasurementTimes,
    costs: CostModel,
    speed: WorkerSpeed | None,
) -> Measures:
    """A worker's measurements, in the form that `paces` compares. speed: what it measured before it served."""
    first_prompts = None if speed is None else _relative(speed.prompts, costs, sparse=False)
    first_step = None if speed is None else first_slowness(speed, costs)
    return Measures(
        prompts=measured(prompt_slowness(load, costs), measured_at.prefill, first=first_prompts),
        sparse_gain=measured(_sparse_gain(load, costs), measured_at.sparse),
        step=measured(_slowness(load, costs), measured_at.step, first=first_step),
        push=measured(load.push_bytes_per_second, measured_at.push, costs.push_bytes_per_second),
        fetch=measured(transfers.fetch_bytes_per_second, measured_at.fetch, costs.fetch_bytes_per_second),
        disk_fetch=measured(
            transfers.disk_fetch_bytes_per_second, measured_at.disk_fetch, costs.disk_fetch_bytes_per_second
        ),
    )


def measured(value: float | None, changed_at: float, constant: float = 1.0, first: float | None = None) -> Measured:
    """A measurement in comparable form. constant: the value if nothing was measured; first: the value from before the
    worker served.
    """
    assumed = log(first / constant) if first else None
    return (value, log(value / constant), changed_at, assumed) if value else (constant, 0.0, NEVER, assumed)


def prompt_rates(candidates: Candidates, costs: CostModel) -> dict[str, float]:
    """Prompt tokens per second of each worker, by its id, over exact and sparse prompts as they come."""
    workers, constant = (*candidates.decode, *candidates.prefill), costs.prefill_tokens_per_second
    known = [
        measured(each.load.prefill_tokens_per_second, each.measured_at.prefill, constant, each.identity.first_rate)
        for each in workers
    ]
    rates = estimates([each.identity.worker_class for each in workers], known, candidates.now)
    return {worker.identity.worker_id: rate for worker, rate in zip(workers, rates, strict=True)}


def estimates(classes: Sequence[str], measured: Sequence[Measured], now: float) -> list[float]:
    """One quantity of each worker, estimated from all measurements: a fresh value counts in full, an old one fades.

    classes: the class of each worker.
    """
    if not measured:
        return []
    # 1 for a fresh measurement, 0 for an infinitely old one, which stands for a missing one.
    weights = [exp2((now - changed_at) / -HALF_LIFE_SECONDS) for _, _, changed_at, _ in measured]
    weighted = [weight * logarithm for weight, (_, logarithm, _, _) in zip(weights, measured, strict=True)]
    sums = _class_sums(classes, weights, weighted)
    weight, total = fsum(of_class for of_class, _ in sums.values()), fsum(of_class for _, of_class in sums.values())
    # The mean of all measurements.
    everyone = total / (ASSUMED_WEIGHT + weight)
    means = {name: _mean(*of_class, everyone) for name, of_class in sums.items()}
    return [
        value * exp((1.0 - weight) * ((means[name] if assumed is None else _mean(*sums[name], assumed)) - logarithm))
        for name, (value, logarithm, _, assumed), weight in zip(classes, measured, weights, strict=True)
    ]


def _measures(worker: CandidateWorker, costs: CostModel) -> Measures:
    return measures(worker.load, worker.transfers, worker.measured_at, costs, worker.identity.speed)


def _class_sums(
    classes: Sequence[str], weights: Sequence[float], weighted: Sequence[float]
) -> dict[str, tuple[float, float]]:
    """The sums of each class's weights and weighted values. They are exact, so that the order of the workers makes no
    difference, not even in the last bit.
    """
    if classes.count(classes[0]) == len(classes):
        return {classes[0]: (fsum(weights), fsum(weighted))}
    sums: dict[str, tuple[float, float]] = {}
    for name in set(classes):
        mine = [each == name for each in classes]
        sums[name] = fsum(compress(weights, mine)), fsum(compress(weighted, mine))
    return sums


def _mean(weight: float, total: float, assumed: float) -> float:
    """The mean of some logarithms and an assumed one. weight, total: the logarithms' weights and weighted values,
    summed.
    """
    return (ASSUMED_WEIGHT * assumed + total) / (ASSUMED_WEIGHT + weight)


def prompt_slowness(load: WorkerLoad, costs: CostModel) -> float | None:
    """The measured time per token of exact prompts, relative to the cost model's with as many tokens before them and as
    many in a step.

    A worker that measured only sparse prompts is assumed to be as fast with exact ones. None if it measured none.
    """
    if load.exact_prompts is None and load.sparse_prompts is not None:
        return _relative(load.sparse_prompts, costs, sparse=True)
    exact = load.exact_pace
    return None if exact is None else _relative(exact, costs, sparse=False)


def _sparse_gain(load: WorkerLoad, costs: CostModel) -> float | None:
    """The factor from a worker's slowness with exact prompts to that with sparse ones; None unless it measured both.

    A worker that has not computed sparsely yet is thus assumed to gain as much by it as the others.
    """
    if load.exact_prompts is None or load.sparse_prompts is None:
        return None
    return _relative(load.sparse_prompts, costs, sparse=True) / _relative(load.exact_prompts, costs, sparse=False)


def _relative(pace: PromptPace, costs: CostModel, sparse: bool) -> float:
    return 1000 / pace.tokens_per_second / paced_token_ms(pace, costs, sparse)


def paced_token_ms(pace: PromptPace, costs: CostModel, sparse: bool) -> float:
    """The cost model's milliseconds of a token at this pace's context, with its part of the step that computes it."""
    token_ms = costs.prompt_token_ms(pace.context_tokens, sparse)
    return token_ms if pace.step_tokens is None else token_ms + costs.prefill_step_ms / pace.step_tokens


def first_slowness(speed: WorkerSpeed, costs: CostModel) -> float:
    """The time of a decode step that a worker measured before it served, relative to the cost model's."""
    return speed.decode_step_ms / costs.decode_ms(max(1.0, speed.decode_step_requests))


def _slowness(load: WorkerLoad, costs: CostModel) -> float | None:
    """The measured step time, relative to the cost model's; None if there is none."""
    if load.decode_step_ms is None:
        return None
    return load.decode_step_ms / costs.decode_ms(max(1.0, load.decode_step_requests or 0.0))
