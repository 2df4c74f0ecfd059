"""What makes placements quicker changes none of them: see `tests.support.recorded_placements`."""

import pytest

from tests.support.recorded_placements import RECORD, placements

# Another C library's logarithms differ in their last bits.
LAST_BITS = 1e-12


def test_every_request_goes_where_it_went_before() -> None:
    recorded = RECORD.read_text().splitlines()
    for before, now in zip(map(split, recorded), map(split, placements()), strict=True):
        assert (now[0], now[2]) == (before[0], before[2])
        assert now[1] == pytest.approx(before[1], rel=LAST_BITS)


def split(line: str) -> tuple[str, float, str]:
    """What was placed and the decision's hash, the sum of its times, and the workers."""
    scene, number, digest, total, workers = line.split(maxsplit=4)
    return f"{scene} {number} {digest}", float(total), workers
