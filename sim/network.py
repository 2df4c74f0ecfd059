"""Links that carry KV, one transfer after another, each at its sender's rate."""

from collections.abc import Callable

from sim.timeline import Timeline


class Link:
    """What one process sends. `slowness` stretches every transfer."""

    def __init__(self, timeline: Timeline, bytes_per_second: float) -> None:
        self.slowness = 1.0
        self.sent_bytes = 0
        self.busy_seconds = 0.0
        self._timeline = timeline
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def send(self, size_bytes: int, done: Callable[[], None], latency_seconds: float = 0.0) -> None:
        """Call `done` when the last byte has arrived."""
        seconds = size_bytes / self._bytes_per_second * self.slowness
        self._free_at = max(self._free_at, self._timeline.now) + seconds
        self.sent_bytes += size_bytes
        self.busy_seconds += seconds
        self._timeline.at(self._free_at + latency_seconds, done)
