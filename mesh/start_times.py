"""How long each phase of a start took."""

import time

import psutil


def process_seconds() -> float:
    """Since the operating system started this process; a program that was put in its place counts from there too."""
    return time.time() - psutil.Process().create_time()


class StartTimes:
    """Phases follow one another: each ends when it is marked, and the next begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, phase: str) -> None:
        """What was done since the last mark was this."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
