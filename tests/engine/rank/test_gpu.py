"""Which GPU a rank computes on."""

import pytest

from engine.rank.gpu import own_first


@pytest.mark.parametrize(
    ("rank", "devices", "visible", "expected"),
    [
        (0, 2, None, "0,1"),
        (1, 2, None, "1,0"),
        (2, 4, "4, 5,6,7", "6,7,4,5"),
        # A worker of two ranks may see more GPUs, and a list may name more than there are.
        (1, 3, "3,GPU-1f,0", "GPU-1f,0,3"),
        (1, 2, "1,0,7", "0,1"),
    ],
)
def test_a_ranks_gpu_comes_first_and_the_others_stay_visible(
    rank: int, devices: int, visible: str | None, expected: str
) -> None:
    assert own_first(rank, devices, visible) == expected
