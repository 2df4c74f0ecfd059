"""Regions of host memory that are locked as they are read."""

from hypothesis import given
from hypothesis import strategies as st

from engine.runner.locked_regions import LockedRegions
from transfer.memory import Run

SIZE, REGION = 1000, 64


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 300)), max_size=20))
def test_every_byte_is_copied_once_from_a_region_locked_once(runs: list[tuple[int, int]]) -> None:
    locked: list[tuple[int, int]] = []
    regions = LockedRegions(SIZE, lambda start, size: locked.append((start, size)), REGION)
    for start, wanted in runs:
        run = Run(start, 7, min(wanted, SIZE - start))
        there = run.start
        for part in regions.split(run):
            region, size = next(each for each in locked if each[0] <= part.start < sum(each))
            assert part.start + part.size_bytes <= region + size <= SIZE
            assert part.start == there and part.place - 7 == part.start - run.start
            there += part.size_bytes
        assert there == run.start + run.size_bytes
    assert len(set(locked)) == len(locked)
    assert sum(size for _, size in locked) <= sum(wanted for _, wanted in runs) + 2 * REGION * len(runs)
