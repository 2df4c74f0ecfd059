"""Memory that is touched for as long as a start may wait for it."""

import logging

import pytest
import torch

from engine.offload import host_pages
from engine.offload.host_pages import HostPages, touched

SIZE, FIRST = 1000, 64


@pytest.fixture(autouse=True)
def _small_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "FIRST_BYTES", FIRST)


class Machine:
    def __init__(self, bytes_a_second: float) -> None:
        self._rate = bytes_a_second
        self.now = 5.0

    def touch(self, memory: torch.Tensor) -> None:
        assert not memory.any()
        memory.fill_(1)
        self.now += len(memory) / self._rate


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1.0, 64), (64.0, 128), (200.0, 256), (1001.0, SIZE), (1e9, SIZE)],
    ids=["a crawl", "slow", "halfway", "just", "fast"],
)
def test_as_much_is_touched_as_the_machine_gives_in_time(rate: float, expected: int) -> None:
    memory, machine = torch.zeros(SIZE, dtype=torch.uint8), Machine(rate)
    assert touched(machine.touch, memory, 2.0, lambda: machine.now) == expected
    assert memory[:expected].all() and not memory[expected:].any()
    assert expected == FIRST or machine.now <= 5.0 + 2.0


def test_memory_smaller_than_the_first_part_is_touched_whole() -> None:
    memory, machine = torch.zeros(10, dtype=torch.uint8), Machine(1e9)
    assert touched(machine.touch, memory, 2.0, lambda: machine.now) == 10


def test_a_node_that_is_not_there_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deepmesh.engine"):
        assert len(HostPages(1 << 20, page_locked=False, node=500).tensor) == 1 << 20
    (record,) = caplog.records
    assert "far from its GPU" in record.message


@pytest.mark.gpu
def test_locked_pages_are_as_many_as_came_in_time() -> None:
    assert len(HostPages(1 << 20, page_locked=True, seconds=60.0).tensor) == 1 << 20
    few = HostPages(1 << 20, page_locked=True, seconds=0.0)
    assert len(few.tensor) == FIRST and few.tensor.is_pinned()
