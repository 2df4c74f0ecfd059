"""Measures how long each phase of a start took."""

import time

import psutil


def process_seconds() -> float:
    """Seconds since the operating system started this process; replacing the program (exec) does not reset it."""
    return time.time() - psutil.Process().create_time()


class StartTimes:
    """Phases follow one another: marking one ends it and begins the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
