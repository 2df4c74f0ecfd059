"""Judges by a rank's heartbeats whether it makes progress. Pure: time is passed in."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol.pulse import LoopProgress

# If a rank has made no progress for STALLED_SECONDS beyond the longest step that it announced, its worker gets no new
# requests. After END_SECONDS the worker is ended, so that its requests move. With the time between two heartbeats, that
# happens within five seconds.
STALLED_SECONDS = 2.0
END_SECONDS = 4.5


@dataclass(frozen=True, slots=True)
class Stall:
    """How long a rank has made no progress, and which part of it is stuck."""

    seconds: float
    cause: str
    # Whether this rank itself is the cause: a step of other ranks cannot end either while they wait for this one.
    is_first: bool = False


class Watchdog:
    """Watches one rank."""

    def __init__(self) -> None:
        self._last: LoopProgress | None = None
        # Seconds since each of the counts last grew.
        self._beat_age = self._step_loop_age = self._transfer_age = 0.0

    def observe(self, progress: LoopProgress, elapsed_seconds: float) -> Stall:
        """Take a reading, `elapsed_seconds` after the last. Time in which this process did not run must not count."""
        last, self._last = self._last, progress
        if last is None:
            # Nothing is known of the time before the first reading.
            last, elapsed_seconds = progress, 0.0
        self._beat_age = _age(self._beat_age, last.beats, progress.beats, elapsed_seconds)
        self._step_loop_age = _age(
            self._step_loop_age, last.step_loop_passes, progress.step_loop_passes, elapsed_seconds
        )
        self._transfer_age = _age(self._transfer_age, last.transfer_passes, progress.transfer_passes, elapsed_seconds)
        stalls = [Stall(self._beat_age, "its process does not run", is_first=True)]
        if progress.step_loop_passes % 2:
            beyond = max(0.0, self._step_loop_age - progress.longest_step_ms / 1000)
            stalls.append(Stall(beyond, "its step does not end"))
        if progress.transfer_passes % 2:
            stalls.append(Stall(self._transfer_age, "its transfer thread hangs", is_first=True))
        return max(stalls, key=lambda stall: stall.seconds)


def blamed(stalls: Sequence[Stall], least_seconds: float) -> int | None:
    """The number of the rank that holds up the others: the longest stalled of those that wait for no other. None if all
    may be waiting.

    least_seconds: shorter stalls do not count.
    """
    causes = [number for number, stall in enumerate(stalls) if stall.is_first and stall.seconds >= least_seconds]
    return max(causes, key=lambda number: (stalls[number].seconds, -number), default=None)


def _age(age: float, last: int, now: int, elapsed_seconds: float) -> float:
    return age + elapsed_seconds if now == last else 0.0
