"""A circuit breaker: leaves a service that keeps failing alone for a while, so that no caller waits for it."""

from collections.abc import Callable


class CircuitBreaker:
    """Opens after `failures` failures in a row; then lets one attempt through every `rest_seconds` until one succeeds.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float], failures: int, rest_seconds: float) -> None:
        self._clock = clock
        self._limit = failures
        self._rest_seconds = rest_seconds
        self._failures = 0
        self._next_try = 0.0

    def allows(self) -> bool:
        """Whether to ask now. While the breaker is open, True uses up the one attempt of its period."""
        if self._failures < self._limit:
            return True
        if self._clock() < self._next_try:
            return False
        self._next_try = self._clock() + self._rest_seconds
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        self._failures += 1
        self._next_try = self._clock() + self._rest_seconds
