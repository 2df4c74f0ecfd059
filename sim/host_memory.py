"""Host memory of a simulated rank: copies take the time of its link, and move no bytes."""

from collections.abc import Callable, Sequence

from sim.network import Link
from sim.timeline import Timeline
from transfer.memory import Done


class SimulatedRead:
    """A copy back to the pool."""

    completed = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def result(self) -> float:
        return self._seconds


class SimulatedSlots:
    """An `engine.moves.host_slots.HostSlots`. Writes cross the link's other direction, and nothing waits for them."""

    completes_later = False

    def __init__(
        self, count: int, block_bytes: int, timeline: Timeline, bytes_per_second: float, wake: Callable[[], None]
    ) -> None:
        """wake: called when a read has completed."""
        self.count = count
        self._block_bytes = block_bytes
        self._timeline = timeline
        self._bytes_per_second = bytes_per_second
        self._link = Link(timeline, bytes_per_second)
        self._wake = wake

    def write(self, blocks: Sequence[int], slots: Sequence[int]) -> Done[None]:
        return Done(None)

    def read(self, slots: Sequence[int], blocks: Sequence[int]) -> SimulatedRead:
        size_bytes = len(blocks) * self._block_bytes
        read = SimulatedRead(size_bytes / self._bytes_per_second)

        def done() -> None:
            read.completed = True
            self._wake()

        self._link.send(size_bytes, done)
        return read
