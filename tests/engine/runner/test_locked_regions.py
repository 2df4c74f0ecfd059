"""Regions of host memory that are locked as they are read."""

from hypothesis import given
from hypothesis import strategies as st

from engine.runner.locked_regions import LockedRegions

SIZE, REGION = 1000, 64


@given(st.lists(st.integers(0, SIZE - 1), max_size=20))
def test_the_region_of_every_place_is_locked_once(places: list[int]) -> None:
    locked: list[tuple[int, int]] = []
    regions = LockedRegions(SIZE, lambda start, size: locked.append((start, size)), REGION)
    for place in places:
        regions.lock_at(place)
        assert any(start <= place < start + size <= SIZE for start, size in locked)
    assert len(locked) == len({place // REGION for place in places})
