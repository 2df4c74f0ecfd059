"""Host memory that a thread locks while others use what is locked."""

import logging
import mmap
from threading import Event

import pytest
import torch

from engine.runner import growing_pages
from engine.runner.growing_pages import GrowingPages
from mesh.errors import EngineFailed

WAIT_SECONDS = 20.0
UNIT = 3000
# The least that begins with a page and holds whole units.
PART = 3000 * 512


class Machine:
    """Locks a part whenever it is let, up to `most` of them."""

    def __init__(self, most: int = 1 << 30) -> None:
        self._most = most
        self._lets = [Event() for _ in range(8)]
        self.locked: list[torch.Tensor] = []
        self.unlocked: list[int] = []

    def let(self, parts: int) -> None:
        for each in self._lets[:parts]:
            each.set()

    def lock(self, part: torch.Tensor) -> None:
        assert self._lets[len(self.locked)].wait(WAIT_SECONDS)
        if len(self.locked) == self._most:
            raise EngineFailed("CUDA cannot page-lock 64 MB")
        self.locked.append(part)

    def unlock(self, part: torch.Tensor) -> None:
        self.unlocked.append(part.data_ptr())

    def pages(self, parts: float) -> GrowingPages:
        return GrowingPages(int(parts * PART), UNIT, None, self.lock, self.unlock)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_pages, "PART_BYTES", 1)


def wait_for(pages: GrowingPages, size_bytes: int) -> None:
    """Until this much is locked."""
    waiting = Event()
    for _ in range(int(WAIT_SECONDS / 0.001)):
        if pages.locked_bytes == size_bytes:
            return
        waiting.wait(0.001)
    raise AssertionError(f"{pages.locked_bytes} bytes are locked")


def test_memory_is_there_part_by_part() -> None:
    machine = Machine()
    pages = machine.pages(2.5)
    assert (pages.locked_bytes, len(pages.tensor)) == (0, int(2.5 * PART))
    for parts in (1, 2, 3):
        machine.let(parts)
        wait_for(pages, min(parts * PART, len(pages.tensor)))
    starts = [part.data_ptr() - pages.tensor.data_ptr() for part in machine.locked]
    assert starts == [0, PART, 2 * PART]
    assert all(start % UNIT == start % mmap.PAGESIZE == 0 for start in starts)


def test_memory_that_goes_is_unlocked_and_no_more_is_locked() -> None:
    machine = Machine()
    pages = machine.pages(4)
    machine.let(2)
    wait_for(pages, 2 * PART)
    # The thread may be at the third part already, which is then locked and unlocked.
    machine.let(3)
    del pages
    assert machine.unlocked == [part.data_ptr() for part in machine.locked] and len(machine.locked) < 4


def test_what_was_locked_stays_if_the_next_part_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(most=2)
    with caplog.at_level(logging.INFO, "deepmesh.engine"):
        pages = machine.pages(4)
        machine.let(8)
        wait_for(pages, 2 * PART)
        del pages
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "lower engine.host_blocks" in record.message
    assert "cannot page-lock" in record.fields["why"]  # type: ignore[attr-defined]


def test_the_end_says_how_much_is_locked(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    with caplog.at_level(logging.INFO, "deepmesh.engine"):
        pages = machine.pages(1)
        machine.let(1)
        wait_for(pages, PART)
        del pages
    (record,) = caplog.records
    assert record.message == "host memory is page-locked" and {"size", "seconds"} == {*vars(record)["fields"]}
