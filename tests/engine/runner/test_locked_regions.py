"""Regions of host memory that are locked as they are read."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from engine.runner.locked_regions import LockedRegions
from engine.runner.locking_ahead import lock_ahead
from tests.support.waiting import wait_until

SIZE, REGION = 1000, 64


@given(st.lists(st.integers(0, SIZE - 1), max_size=20))
def test_the_region_of_every_place_is_locked_once(places: list[int]) -> None:
    locked: list[tuple[int, int]] = []
    regions = LockedRegions(SIZE, lambda start, size: locked.append((start, size)), REGION)
    for place in places:
        regions.lock_at(place)
        assert any(start <= place < start + size <= SIZE for start, size in locked)
    assert len(locked) == len({place // REGION for place in places})


def test_regions_are_locked_in_order_once_filled() -> None:
    locked: list[int] = []
    filled = {0, 64}
    regions = LockedRegions(200, lambda start, size: locked.append(start), REGION)

    def is_filled(start: int, size: int) -> bool:
        assert size == min(REGION, 200 - start)
        return start in filled

    regions.lock_at(70)
    assert [regions.lock_next(is_filled) for _ in range(2)] == [True, False] and locked == [64, 0]
    filled |= {128, 192}
    assert [regions.lock_next(is_filled) for _ in range(3)] == [True, True, False] and regions.all_locked
    assert locked == [64, 0, 128, 192]


def test_a_thread_locks_ahead_until_its_owner_goes() -> None:
    locked: list[int] = []
    regions = LockedRegions(1 << 40, lambda start, size: locked.append(start), REGION)

    class Owner:
        pass

    owner = Owner()
    lock_ahead(owner, regions, lambda start, size: True, lambda: locked.append(-1))
    wait_until(lambda: len(locked) > 3)
    assert locked[:4] == [-1, 0, 64, 128]
    del owner
    assert "locks-ahead" not in [thread.name for thread in threading.enumerate()]
