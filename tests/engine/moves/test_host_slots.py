"""Copies between a pool and host memory, compared with tensors indexed by hand."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.memory import memory_plan
from engine.moves.host_slots import HostSlots, PlainSlots
from engine.runner.staged_slots import StagedSlots

LAYERS, BLOCKS, WIDTH, SLOTS = 3, 9, 24, 6
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
# Without a GPU only the CPU form of "staged" runs.
WAYS = ["plain", "staged", pytest.param("gpu", marks=pytest.mark.gpu)]


def random_pool(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(256, (LAYERS, BLOCKS, 64, WIDTH * dtype.itemsize), dtype=torch.uint8).view(dtype)


def bytes_of(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8).cpu().clone()


def slots_of(way: str, pool: torch.Tensor) -> tuple[torch.Tensor, HostSlots]:
    """The pool where that way expects it, and slots next to it."""
    if way == "plain":
        return pool, PlainSlots([pool.flatten(2).view(torch.uint8).numpy()], SLOTS)
    pool = pool.cuda() if way == "gpu" else pool
    return pool, staged([pool])


def staged(planes: list[torch.Tensor]) -> StagedSlots:
    """Once all slots are there: on a GPU a thread locks their memory."""
    slots = StagedSlots(planes, SLOTS)
    while slots.count < SLOTS:
        time.sleep(0.001)
    return slots


@pytest.fixture(autouse=True)
def _two_blocks_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging buffer takes two blocks of the narrowest dtype, and one of the others."""
    monkeypatch.setattr(memory_plan, "HOST_STAGING_BYTES", 2 * LAYERS * 64 * WIDTH)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_blocks_come_back_to_other_places_unchanged(way: str, dtype: torch.dtype, count: int) -> None:
    pool, slots = slots_of(way, random_pool(dtype))
    rng = np.random.default_rng(count)
    blocks, targets = (rng.permutation(BLOCKS)[:count].tolist() for _ in range(2))
    places = rng.permutation(SLOTS)[:count].tolist()
    before = bytes_of(pool)
    slots.write(blocks, places).result()
    pool.view(torch.uint8).fill_(0xA5)
    assert slots.read(places, targets).result() >= 0
    expected = torch.full_like(before, 0xA5)
    expected[:, targets] = before[:, blocks]
    assert torch.equal(bytes_of(pool), expected)


@pytest.mark.parametrize("way", WAYS)
def test_all_planes_of_a_block_come_back(way: str) -> None:
    planes = [random_pool(torch.bfloat16), random_pool(torch.float8_e4m3fn)]
    if way == "plain":
        slots: HostSlots = PlainSlots([plane.flatten(2).view(torch.uint8).numpy() for plane in planes], SLOTS)
    else:
        planes = [plane.cuda() for plane in planes] if way == "gpu" else planes
        slots = staged(planes)
    before = [bytes_of(plane) for plane in planes]
    slots.write([1, 2, 7], [4, 0, 2]).result()
    slots.read([0, 4, 2], [8, 5, 0]).result()
    for plane, kept in zip(planes, before, strict=True):
        kept[:, [8, 5, 0]] = kept[:, [2, 1, 7]]
        assert torch.equal(bytes_of(plane), kept)


@pytest.mark.parametrize("way", WAYS)
def test_of_two_blocks_for_one_slot_the_later_one_stays(way: str) -> None:
    pool, slots = slots_of(way, random_pool(torch.bfloat16))
    before = bytes_of(pool)
    slots.write([1, 2, 3], [4, 0, 4]).result()
    slots.read([4], [8]).result()
    assert torch.equal(bytes_of(pool)[:, 8], before[:, 3])


@pytest.mark.parametrize("way", WAYS)
def test_a_read_sees_the_write_queued_before_it(way: str) -> None:
    pool, slots = slots_of(way, random_pool(torch.bfloat16))
    before = bytes_of(pool)
    slots.write([1, 2], [0, 1])
    slots.read([1, 0], [5, 6]).result()
    assert torch.equal(bytes_of(pool)[:, [5, 6]], before[:, [2, 1]])


@pytest.mark.gpu
def test_copies_do_not_wait_for_the_engines_stream() -> None:
    """A gather of blocks that no step writes must not queue after a step under way."""
    _, slots = slots_of("gpu", random_pool(torch.bfloat16))
    slots.write([0], [0]).result()
    over = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    over.record()
    slots.write([1], [1]).result()
    assert not over.query()


@pytest.mark.parametrize("make", [lambda pool: slots_of("plain", pool), lambda pool: slots_of("staged", pool)])
def test_memory_that_cannot_be_had_is_an_error(
    make: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine.moves.test_host_slots.SLOTS", 1 << 44)
    with pytest.raises(MemoryError):
        make(random_pool(torch.bfloat16))
