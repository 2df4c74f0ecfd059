"""What a decode step takes with more or fewer drafts, measured before a worker serves."""

import time

from engine.batch import Backend, Batch, Row, StepShape, execute
from engine.step_times import StepTimes
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.sampling import Sampling

# Tokens of each row's context, if the model's context is as long.
CONTEXT_TOKENS = 1024
# Others may use the machine: the quickest of so many counts, after one that is not counted.
REPEATS = 3


def measure_depths(backend: Backend, max_requests: int, most: int, block: int) -> StepTimes:
    """For 1, 2, 4, ... max_requests rows and 0 to `most` drafts. `block` is one that nobody reads."""
    rows = [1 << exponent for exponent in range(max_requests.bit_length()) if 1 << exponent < max_requests]
    rows.append(max_requests)
    seconds = [[_measure(backend, count, depth, block) for depth in range(1 + most)] for count in rows]
    return StepTimes(rows, seconds)


def _measure(backend: Backend, rows: int, depth: int, block: int) -> float:
    end = min(CONTEXT_TOKENS, backend.context_tokens)
    start = max(end - 1 - depth, 0)
    blocks = [block] * -(-(start + 1 + 2 * depth) // BLOCK_TOKENS)
    batch = Batch(0, [Row([0] * (1 + depth), start, blocks, Sampling(), drafts=depth)] * rows)
    shape = StepShape(rows * (1 + depth), decode_only=not depth, drafts=depth, drawing=rows)
    taken = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        execute(backend, batch, shape)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
