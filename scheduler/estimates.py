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
from itertools import chain, compress, repeat
from math import exp, exp2, fsum, log
from operator import mul
from typing import TypeAlias

import msgspec

from mesh.costs import CostModel
from mesh.domain.workers import PromptPace, WorkerLoad
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

    Nobody asks for a decode worker's pushes, a prefill worker's steps, or fetches where no store has anything: they are
    the constants.
    """
    workers, costs, now = (*candidates.decode, *candidates.prefill), knobs.costs, candidates.now
    decodes = len(candidates.decode)
    prompts = estimates(
        [(each.worker_class, _prompt_slowness(each.load, costs), now - each.measured_at.prefill) for each in workers],
        1.0,
    )
    sparse = prompts
    if any(each.sparse for each in workers):
        gains = estimates(
            [(each.worker_class, _sparse_gain(each.load, costs), now - each.measured_at.sparse) for each in workers],
            1.0,
        )
        sparse = [*map(mul, prompts, gains)]
    slowness = estimates(
        [(each.worker_class, _slowness(each.load, costs), now - each.measured_at.step) for each in candidates.decode],
        1.0,
    )
    push = estimates(
        [
            (each.worker_class, each.load.push_bytes_per_second, now - each.measured_at.push)
            for each in candidates.prefill
        ],
        costs.push_bytes_per_second,
    )
    fetch: Iterable[float] = repeat(costs.fetch_bytes_per_second)
    if candidates.stores:
        fetch = estimates(
            [(each.worker_class, each.fetch_bytes_per_second, now - each.measured_at.fetch) for each in workers],
            costs.fetch_bytes_per_second,
        )
    disk_fetch: Iterable[float] = repeat(costs.disk_fetch_bytes_per_second)
    if any(store.disk_blocks for store in candidates.stores.values()):
        disk_fetch = estimates(
            [
                (each.worker_class, each.disk_fetch_bytes_per_second, now - each.measured_at.disk_fetch)
                for each in workers
            ],
            costs.disk_fetch_bytes_per_second,
        )
    steps = chain(slowness, repeat(1.0))
    pushes = chain(repeat(costs.push_bytes_per_second, decodes), push)
    paces = map(Pace, prompts, sparse, steps, pushes, fetch, disk_fetch)
    estimated = [msgspec.structs.replace(worker, estimate=pace) for worker, pace in zip(workers, paces, strict=True)]
    return replace(candidates, decode=estimated[:decodes], prefill=estimated[decodes:])


def prompt_rates(candidates: Candidates, costs: CostModel) -> dict[str, float]:
    """Prompt tokens a second of each worker, by its id: exact and sparse ones together, as they come."""
    workers, now = (*candidates.decode, *candidates.prefill), candidates.now
    rates = estimates(
        [(each.worker_class, each.load.prefill_tokens_per_second, now - each.measured_at.prefill) for each in workers],
        costs.prefill_tokens_per_second,
    )
    return {worker.worker_id: rate for worker, rate in zip(workers, rates, strict=True)}


def estimates(measured: Sequence[Measured], constant: float) -> list[float]:
    """Of one quantity, for each worker from what all measured: a fresh value counts in full, an old one gives way."""
    if not any(value for _, value, _ in measured):
        return [constant] * len(measured)
    # 1 for a fresh measurement, 0 for an infinitely old one.
    weights = [exp2(age / -HALF_LIFE_SECONDS) if value else 0.0 for _, value, age in measured]
    logarithms = [log(value / constant) if value else 0.0 for _, value, _ in measured]
    means = _class_means([name for name, _, _ in measured], weights, [*map(mul, weights, logarithms)])
    return [
        value * exp((1.0 - weight) * (means[name] - logarithm)) if value else constant * exp(means[name])
        for (name, value, _), weight, logarithm in zip(measured, weights, logarithms, strict=True)
    ]


def _class_means(classes: Sequence[str], weights: Sequence[float], weighted: Sequence[float]) -> dict[str, float]:
    """The weighted mean of what each class measured, and of an assumption that counts little: what all measured."""
    # Exact sums, so that the order of the workers makes no difference, not even in the last bit.
    sums = {name: (fsum(weights), fsum(weighted)) for name in classes[:1]}
    if classes.count(classes[0]) < len(classes):
        for name in set(classes):
            mine = [each == name for each in classes]
            sums[name] = fsum(compress(weights, mine)), fsum(compress(weighted, mine))
    weight, total = (fsum(each) for each in zip(*sums.values(), strict=True))
    everyone = total / (ASSUMED_WEIGHT + weight)
    return {
        name: (ASSUMED_WEIGHT * everyone + total) / (ASSUMED_WEIGHT + weight) for name, (weight, total) in sums.items()
    }


def _prompt_slowness(load: WorkerLoad, costs: CostModel) -> float | None:
    """The measured time of an exact prompt's tokens, relative to the cost model's with as many tokens before them.

    A worker that measured sparse ones alone is taken to be as fast with exact ones. None if it measured none.
    """
    if load.exact_prompts is None and load.sparse_prompts is not None:
        return _relative(load.sparse_prompts, costs, sparse=True)
    exact = load.exact_pace
    return None if exact is None else _relative(exact, costs, sparse=False)


def _sparse_gain(load: WorkerLoad, costs: CostModel) -> float | None:
    """What a worker's slowness with exact prompts is to be multiplied by for sparse ones; None unless it measured both.

    A worker that has not computed sparsely yet is so taken to gain by it what the others do.
    """
    if load.exact_prompts is None or load.sparse_prompts is None:
        return None
    return _relative(load.sparse_prompts, costs, sparse=True) / _relative(load.exact_prompts, costs, sparse=False)


def _relative(pace: PromptPace, costs: CostModel, sparse: bool) -> float:
    return 1000 / pace.tokens_per_second / costs.prompt_token_ms(pace.context_tokens, sparse)


def _slowness(load: WorkerLoad, costs: CostModel) -> float | None:
    """The measured step time, relative to the cost model's; None if there is none."""
    if load.decode_step_ms is None:
        return None
    return load.decode_step_ms / costs.decode_ms(max(1.0, load.decode_step_requests or 0.0))
