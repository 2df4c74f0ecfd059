"""Times equal steps on a backend that serves nothing yet."""

import random
import time
from collections.abc import Callable
from itertools import pairwise

from engine.backend import Backend, Launched
from engine.batch import Batch, Row
from engine.step.shape import StepShape
from mesh.blocks import blocks_for
from mesh.domain.sampling import Sampling


def drawn_tokens(backend: Backend, tokens: int, rank: int) -> list[int]:
    """Token ids for steps that are timed. Equal ones would choose equal experts, and a step would read too few: those
    of each of a worker's dp ranks are its own.
    """
    return random.Random(rank).choices(range(backend.vocabulary_size), k=tokens)


def decoding(
    backend: Backend, requests: int, drafts: int, end: int, block: int, rank: int = 0
) -> tuple[Batch, StepShape]:
    """A step of `requests` rows with drafts, each of which ends at position `end`. block: one that is never read; rank:
    this one's number among the worker's dp ranks.
    """
    start, width = max(end - 1 - drafts, 0), 1 + drafts
    blocks, token_ids = [block] * blocks_for(start + 1 + 2 * drafts), drawn_tokens(backend, requests * width, rank)
    rows = [
        Row(token_ids[first : first + width], start, blocks, Sampling(), drafts=drafts)
        for first in range(0, requests * width, width)
    ]
    return Batch(0, rows), StepShape(requests * width, drafts=drafts, drawing=requests, rows=requests)


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
