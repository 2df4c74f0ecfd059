"""Host memory whose reads take until a test carries them out, as those of a GPU take a while."""

from collections.abc import Callable, Sequence
from functools import partial

from engine.moves.host_slots import HostSlots, PlainSlots
from engine.oracle.backend import OracleBackend
from transfer.host_memory import Pool


class LaterRead:
    """A copy that is carried out when `run` is called, and no earlier."""

    completed = False

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy = copy

    def run(self) -> None:
        self._copy()
        self.completed = True

    def result(self) -> float:
        assert self.completed, "a read must not be waited for"
        return 0.001


class LaterSlots:
    def __init__(self, pool: Pool, count: int, later: Callable[[Callable[[], None]], None]) -> None:
        """later: takes each copy, to carry it out later."""
        self.count = count
        self._plain: HostSlots = PlainSlots(pool, count)
        self._later = later
        self.write = self._plain.write

    def read(self, slots: Sequence[int], blocks: Sequence[int]) -> LaterRead:
        read = LaterRead(partial(self._plain.read, list(slots), list(blocks)))
        self._later(read.run)
        return read


def read_later(backend: OracleBackend, count: int, later: Callable[[Callable[[], None]], None]) -> None:
    """Give the backend's engine host memory of this many blocks."""
    pool = backend.pool
    backend.host_slots = lambda: LaterSlots(pool, count, later)  # type: ignore[method-assign]
