"""Pauses between the attempts of a link that failed: longer each time, and only the first failure in a row is a
warning.
"""

import logging
import random
from collections.abc import Awaitable, Callable

from mesh.cancellation import pause
from mesh.errors import MeshError

FIRST_SECONDS = 0.1
LAST_SECONDS = 5.0


class Backoff:
    """Waits 0.1 s, doubled for each failure in a row up to `last_seconds`; each pause is drawn from the upper half of
    that.
    """

    def __init__(
        self,
        log: logging.Logger,
        sleep: Callable[[float], Awaitable[None]] = pause,
        last_seconds: float = LAST_SECONDS,
    ) -> None:
        self._log = log
        self._sleep = sleep
        self._last_seconds = last_seconds
        self._seconds = FIRST_SECONDS

    def succeeded(self) -> None:
        """The link works: the next failure is the first in a row."""
        self._seconds = FIRST_SECONDS

    async def failed(self, what: str, error: MeshError) -> None:
        """Log what failed, and return when it is time for another try."""
        # Warn once, not at every attempt while a service is away for long.
        level = logging.WARNING if self._seconds == FIRST_SECONDS else logging.DEBUG
        self._log.log(level, "%s: %s", what, error.message)
        await self._sleep(self._seconds * random.uniform(0.5, 1.0))
        self._seconds = min(2 * self._seconds, self._last_seconds)
