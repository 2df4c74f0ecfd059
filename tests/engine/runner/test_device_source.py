"""Copies from another process' memory, by a driver that copies to host memory."""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from cuda.bindings import driver as cuda

from engine.runner import device_source
from engine.runner.device_source import DeviceSource
from transfer.gmac import tags
from transfer.landing import NOT_COPIED
from transfer.memory import Check, KeyedPieces
from transfer.segments import Tile

# The store's blocks have a layer more than the worker's. One and a half of them have a page.
STORE_BLOCKS, STORE_LAYERS, LAYERS, BLOCKS, WIDTHS = 9, 4, 3, 5, (512, 256)
PIECE = sum(WIDTHS)
REGION = 3 * 4096


class FakeDriver:
    CUresult, CUmemorytype, CUDA_MEMCPY2D = cuda.CUresult, cuda.CUmemorytype, SimpleNamespace

    def __init__(self, most_regions: int) -> None:
        self._most_regions = most_regions
        self.locked: dict[int, int] = {}
        self.copies: list[tuple[int, int]] = []
        self.fails = False

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> Any:
        assert 0 < size_bytes <= REGION and flags == 0
        if len(self.locked) == self._most_regions:
            return (self.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self.locked[address] = size_bytes
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int) -> None:
        del self.locked[address]

    def cuMemcpyHtoDAsync(self, target: int, source: int, size_bytes: int, stream: int) -> Any:
        return self._copy(target, source, 1, size_bytes, (0, 0), stream)

    def cuMemcpy2DAsync(self, rows: Any, stream: int) -> Any:
        assert rows.srcMemoryType == cuda.CUmemorytype.CU_MEMORYTYPE_HOST
        assert rows.dstMemoryType == cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        pitches = rows.dstPitch, rows.srcPitch
        return self._copy(rows.dstDevice, rows.srcHost, rows.Height, rows.WidthInBytes, pitches, stream)

    def _copy(self, target: int, source: int, rows: int, size: int, pitches: tuple[int, int], stream: int) -> Any:
        assert stream == 7
        self.copies.append((rows, size))
        for row in range(rows):
            ctypes.memmove(target + row * pitches[0], source + row * pitches[1], size)
        return (self.CUresult.CUDA_ERROR_INVALID_VALUE if self.fails else self.CUresult.CUDA_SUCCESS,)


class Made:
    """A source of random bytes, and a pool of two planes that gets them."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        shape = STORE_BLOCKS, STORE_LAYERS, PIECE
        self.mapped = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
        self.planes = [torch.zeros(LAYERS, BLOCKS, width, dtype=torch.uint8) for width in WIDTHS]
        # A list of its own: the source is to go with the last reference to it.
        self.waits = waits = list[None]()
        event = SimpleNamespace(query=lambda: True, synchronize=lambda: waits.append(None))
        stream: Any = SimpleNamespace(cuda_stream=7, record_event=lambda: event)
        self.source = DeviceSource(self.mapped, self.planes, stream)

    def check(self, tile: Tile, sources: Sequence[int], blocks: Sequence[int]) -> None:
        """Whether the pool has these blocks of the source in these places, and nothing elsewhere."""
        layers = slice(tile.first_layer, tile.first_layer + tile.layer_count)
        expected = np.zeros((LAYERS, BLOCKS, PIECE), np.uint8)
        for source, block in zip(sources, blocks, strict=True):
            expected[layers, block] = self.mapped[source, layers]
        assert (torch.cat(self.planes, dim=2).numpy() == expected).all()


Make: TypeAlias = Callable[[int], Made]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a source of which at most this many regions can be locked."""

    def make(most_regions: int) -> Made:
        driver = FakeDriver(most_regions)
        monkeypatch.setattr(device_source, "driver", driver)
        monkeypatch.setattr(device_source, "REGION_BYTES", REGION)
        return Made(driver)

    return make


@pytest.mark.parametrize("most_regions", [1, 10], ids=["one locked", "all locked"])
@pytest.mark.parametrize("tile", [Tile(0, 3, 0, 3), Tile(1, 2, 4, 3)], ids=["all layers", "some layers"])
def test_blocks_reach_their_places_in_all_planes(make: Make, tile: Tile, most_regions: int) -> None:
    made = make(most_regions)
    copied = made.source.copy(tile, [8, 0, 4], [1, 4, 2])
    assert copied.completed and copied.result() is None
    made.check(tile, [8, 0, 4], [1, 4, 2])
    assert made.driver.copies == [(tile.layer_count, width) for width in WIDTHS] * 3


def test_a_region_begins_with_a_page_and_a_block(make: Make) -> None:
    made = make(10)
    made.source.copy(Tile(0, 3, 0, STORE_BLOCKS), range(STORE_BLOCKS), [0] * STORE_BLOCKS)
    starts = [address - made.mapped.ctypes.data for address in made.driver.locked]
    assert starts == [0, REGION, 2 * REGION] and REGION % (STORE_LAYERS * PIECE) == REGION % 4096 == 0
    assert sum(made.driver.locked.values()) == made.mapped.nbytes


def test_layers_too_far_apart_are_copied_one_by_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_source, "MOST_PITCH", BLOCKS * WIDTHS[1])
    made = make(10)
    made.source.copy(Tile(1, 2, 0, 1), [5], [3])
    made.check(Tile(1, 2, 0, 1), [5], [3])
    assert made.driver.copies == [(1, WIDTHS[0])] * 2 + [(2, WIDTHS[1])]


KEYS = [bytes([number]) * 32 for number in range(3)]
# Two blocks; the last layer of the second one has another key.
KEYED = [KeyedPieces(0, 1, 2, KEYS[0]), KeyedPieces(1, 1, 1, KEYS[1]), KeyedPieces(1, 2, 1, KEYS[2])]


def test_blocks_are_checked_by_their_tags_where_they_arrived(make: Make) -> None:
    made = make(10)
    expected = [
        tags(each.key, each.first_layer, [made.mapped[[8, 0][each.block], layer].data for layer in layers])
        for each in KEYED
        for layers in [range(each.first_layer, each.first_layer + each.layers)]
    ]
    found: list[Sequence[bytes]] = []

    def refusal(tags: Sequence[bytes]) -> str:
        found.append(tags)
        return "wrong"

    copied = made.source.copy(Tile(1, 2, 0, 2), [8, 0], [1, 4], Check(KEYED, refusal))
    # Now the owner gives them to other blocks.
    made.mapped[:] = 0
    assert copied.completed and copied.result() == "wrong" and len(made.waits) == 1
    assert found == [expected]


@pytest.fixture
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_garbage_collection")
def test_what_was_locked_is_unlocked_at_once_in_the_end(make: Make) -> None:
    made = make(10)
    copying = made.source.copy(Tile(0, 3, 0, 2), [0, 8], [0, 1])
    users = sys.getrefcount(made.mapped)
    del made.source
    assert len(made.driver.locked) == 2
    del copying
    assert not made.driver.locked and sys.getrefcount(made.mapped) < users


@pytest.mark.parametrize("check", [None, Check(KEYED[:1], lambda _: None)], ids=["unchecked", "checked"])
def test_a_copy_that_the_driver_refuses_fails(make: Make, check: Check | None) -> None:
    made = make(10)
    made.driver.fails = True
    assert made.source.copy(Tile(0, 3, 0, 1), [0], [0], check).result() == NOT_COPIED


def test_memory_of_which_nothing_can_be_locked_is_an_error(make: Make) -> None:
    with pytest.raises(OSError, match="cannot page-lock it"):
        make(0)
