"""Host memory whose copies take until a test carries them out, as those of a GPU take a while."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from engine.moves.host_slots import PlainSlots
from engine.oracle.backend import OracleBackend
from transfer.memory import Pool

Result = TypeVar("Result", covariant=True)
Later: TypeAlias = Callable[[Callable[[], None]], None]


class LaterCopy(Generic[Result]):
    """A copy that is carried out when `run` is called, and no earlier, unless a later one is."""

    completed = False

    def __init__(self, queue: "list[LaterCopy[object]]", copy: Callable[[], object], result: Result) -> None:
        self._queue = queue
        self._copy = copy
        self._result = result
        queue.append(self)

    def run(self) -> None:
        while not self.completed:
            first = self._queue.pop(0)
            first._copy()
            first.completed = True


class LaterRead(LaterCopy[float]):
    def result(self) -> float:
        assert self.completed, "a read must not be waited for"
        return self._result


class LaterWrite(LaterCopy[None]):
    def result(self) -> None:
        self.run()


class LaterSlots:
    """Copies are carried out in the order of the calls."""

    completes_later = True

    def __init__(self, pool: Pool, count: int, later_read: Later, later_write: Later) -> None:
        """later_read, later_write: take each copy, to carry it out later."""
        self.count = count
        self._plain = PlainSlots([pool], count)
        self._later_read = later_read
        self._later_write = later_write
        self._queue: list[LaterCopy[object]] = []

    def write(self, blocks: Sequence[int], slots: Sequence[int]) -> LaterWrite:
        write = LaterWrite(self._queue, partial(self._plain.write, list(blocks), list(slots)), None)
        self._later_write(write.run)
        return write

    def read(self, slots: Sequence[int], blocks: Sequence[int]) -> LaterRead:
        read = LaterRead(self._queue, partial(self._plain.read, list(slots), list(blocks)), 0.001)
        self._later_read(read.run)
        return read


def copy_later(backend: OracleBackend, count: int, later_read: Later, later_write: Later) -> None:
    """Give the backend's engine host memory of this many blocks."""
    slots = LaterSlots(backend.pool, count, later_read, later_write)
    backend.host_slots = lambda: slots  # type: ignore[method-assign]
