"""Copies from another process' memory, by a driver that copies to host memory."""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from cuda.bindings import driver as cuda

from engine.runner import device_source
from engine.runner.device_source import DeviceSource
from transfer.memory import Run

REGION, SIZE = 4096, 10_000


class FakeDriver:
    CUresult = cuda.CUresult

    def __init__(self, most_regions: int) -> None:
        self._most_regions = most_regions
        self.locked: list[int] = []
        self.copies: list[int] = []
        self.fails = False

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> Any:
        assert 0 < size_bytes <= REGION and flags == 0
        if len(self.locked) == self._most_regions:
            return (self.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self.locked.append(address)
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int) -> None:
        self.locked.remove(address)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size_bytes: int, stream: int) -> Any:
        assert stream == 7
        self.copies.append(size_bytes)
        ctypes.memmove(target, source, size_bytes)
        return (self.CUresult.CUDA_ERROR_INVALID_VALUE if self.fails else self.CUresult.CUDA_SUCCESS,)


class Slot:
    """A staging buffer whose last job is over."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(SIZE, dtype=torch.uint8)
        self.done: Any = SimpleNamespace(record=lambda stream: None, query=lambda: True)


Made: TypeAlias = tuple[Any, FakeDriver, np.ndarray]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Made]:
    """Makes a source of random bytes, of which at most this many regions can be locked."""

    def make(most_regions: int) -> Made:
        driver = FakeDriver(most_regions)
        monkeypatch.setattr(device_source, "driver", driver)
        monkeypatch.setattr(device_source, "REGION_BYTES", REGION)
        memory = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
        stream: Any = SimpleNamespace(cuda_stream=7)
        return DeviceSource(memory, stream), driver, memory

    return make


@pytest.mark.parametrize("most_regions", [1, 10], ids=["one locked", "all locked"])
def test_bytes_of_several_regions_reach_their_places(make: Callable[[int], Made], most_regions: int) -> None:
    source, driver, memory = make(most_regions)
    slot = Slot()
    staging = source.stage([Run(100, 0, 20), Run(4000, 50, 6000)], slot)
    assert staging.completed and staging.error() is None
    assert (slot.tensor[:20].numpy() == memory[100:120]).all()
    assert (slot.tensor[50:6050].numpy() == memory[4000:10_000]).all()
    assert driver.copies == [20, 96, 4096, 1808]
    assert len(driver.locked) == min(most_regions, 3)


@pytest.fixture
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_garbage_collection")
def test_what_was_locked_is_unlocked_at_once_in_the_end(make: Callable[[int], Made]) -> None:
    source, driver, memory = make(10)
    users = sys.getrefcount(memory)
    copying = source.stage([Run(0, 0, SIZE)], Slot())
    del source
    assert len(driver.locked) == 3
    del copying
    assert not driver.locked and sys.getrefcount(memory) < users


def test_a_copy_that_the_driver_refuses_is_an_error(make: Callable[[int], Made]) -> None:
    source, driver, _ = make(10)
    driver.fails = True
    assert "INVALID_VALUE" in source.stage([Run(0, 0, 1)], Slot()).error()


def test_memory_of_which_nothing_can_be_locked_is_an_error(make: Callable[[int], Made]) -> None:
    with pytest.raises(OSError, match="cannot page-lock it"):
        make(0)
