"""Logs the progress of long work."""

import logging
import time
from collections.abc import Callable

# Work that ends sooner logs nothing.
EVERY_SECONDS = 5.0

_log = logging.getLogger("deepmesh.progress")


class ProgressLog:
    """`advance` logs the share that is done, with an estimate of what is left, every few seconds."""

    def __init__(self, work: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._total = total
        self._clock = clock
        self._done = 0
        self._began_at = self._said_at = clock()

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now = self._clock()
        if now - self._said_at < EVERY_SECONDS or not self._done:
            return
        self._said_at = now
        left_seconds = (now - self._began_at) * (self._total - self._done) / self._done
        fields = {"done": f"{self._done / self._total:.0%}", "left_s": round(left_seconds)}
        _log.info(self._work, extra={"fields": fields})
