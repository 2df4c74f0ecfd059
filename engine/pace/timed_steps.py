"""Times equal steps on a backend that serves nothing yet."""

import time
from collections.abc import Callable
from itertools import pairwise

from engine.batch import Backend, Batch, Launched, StepShape


def quickest_step(
    backend: Backend,
    batch: Batch,
    shape: StepShape,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of the quickest of `repeats` equal steps, since others may use the machine; one step before them is not
    counted. All ranks of a worker make the same calls at once.

    Each step is launched before the one before it is collected, as the engine does if the device computes meanwhile.
    """
    collected: list[float] = []
    before: Launched | None = None
    for _ in range(2 + repeats):
        launched = backend.launch(batch, shape)
        launched.draw()
        if before is not None:
            before.collect()
            collected.append(clock())
        before = launched
    if before is not None:
        before.collect()
    return min(later - earlier for earlier, later in pairwise(collected))
