"""What a decode step takes with more or fewer drafts, measured before a worker serves."""

import logging
from collections.abc import Sequence

import numpy as np

from engine.backend import Backend
from engine.pace.step_times import StepTimes
from engine.pace.timed_steps import decoding, quickest_step
from mesh.progress import ProgressLog

_log = logging.getLogger("deepmesh.engine")

# Tokens of each row's context, if the model's context is that long. A GPU serves longer contexts, and attention over
# them decides what drafts cost: 64 rows with two drafts took R1's rank 39 ms with 1,024 tokens and 53 with 3,500.
CONTEXT_TOKENS = 1024
CONTEXT_TOKENS_AHEAD = 4096


def measure_depths(backend: Backend, max_requests: int, most: int, block: int, rank: int = 0) -> StepTimes:
    """Measure steps of 1, 2, 4, ... max_requests rows with 0 to `most` drafts. block, rank: see `timed_steps.decoding`.

    Only none, one and `most` drafts are measured: what lies between is within 5% of a line, for one row of R1 on four
    H200, and within 2% for 96.
    """
    depths = sorted({0, min(1, most), most})
    rows = [1 << exponent for exponent in range(max_requests.bit_length()) if 1 << exponent < max_requests]
    rows.append(max_requests)
    # Most of the time goes to the last numbers of rows.
    progress = ProgressLog("measuring steps with drafts", sum(rows) * len(depths))
    seconds: list[list[float]] = []
    for count in rows:
        measured = []
        for depth in depths:
            measured.append(_measure(backend, count, depth, block, rank))
            progress.advance(count)
        seconds.append(np.interp(range(1 + most), depths, measured).tolist())
        _log.info("steps by drafts", extra={"fields": {"rows": count, "ms": _milliseconds(seconds[-1])}})
    return StepTimes(rows, seconds)


def _measure(backend: Backend, rows: int, depth: int, block: int, rank: int) -> float:
    end = min(CONTEXT_TOKENS_AHEAD if backend.asynchronous else CONTEXT_TOKENS, backend.context_tokens)
    return quickest_step(backend, *decoding(backend, rows, depth, end, block, rank))


def _milliseconds(seconds: Sequence[float]) -> str:
    """Milliseconds by depth, for the log."""
    return ",".join(f"{1000 * each:.2f}" for each in seconds)
