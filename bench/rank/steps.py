"""Decode steps of one engine, around contexts of equal length: warmed up, timed, then traced."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from bench.rank.kernel_trace import KernelTrace, trace_kernels
from bench.rank.load import RankLoad

CONTEXT = 3500
WARM_STEPS = 12
TRACED_STEPS = 8
SPARE_TOKENS = 256


@dataclass(frozen=True)
class TimedSteps:
    seconds: Sequence[float]
    # Tokens that a request gets in a step, and drafts that are verified for them.
    tokens: float
    drafts: float

    @property
    def step_ms(self) -> float:
        """The median; with drafts the mean, because steps may differ."""
        return (mean(self.seconds) if self.drafts else median(self.seconds)) * 1000


def start_steps(
    load: RankLoad, requests: int, context: int, steps: int, most: int = 0, shares: Sequence[float] = ()
) -> None:
    """Start requests and warm up, so that the middle one of the steps to be timed has contexts of `context` tokens.
    most: drafts of a row; shares: those that are accepted (see PinnedAcceptance).
    """
    expected = 1 + sum(shares[:most])
    all_steps = WARM_STEPS + steps + TRACED_STEPS + 4
    start = context - int((WARM_STEPS + steps // 2) * expected)
    load.start_decoding(requests, start, min(all_steps * (1 + most), context + SPARE_TOKENS - start - 1))
    load.decode_seconds(WARM_STEPS)


def time_steps(load: RankLoad, requests: int, steps: int) -> TimedSteps:
    tokens, verified = load.tokens, load.verified
    seconds = load.decode_seconds(steps)
    rows = steps * requests
    return TimedSteps(seconds, (load.tokens - tokens) / rows, (load.verified - verified) / rows)


def trace_steps(load: RankLoad) -> KernelTrace:
    """Trace TRACED_STEPS steps, then run the requests to their ends."""
    trace = trace_kernels(lambda: load.decode_seconds(TRACED_STEPS))
    load.drain()
    return trace
