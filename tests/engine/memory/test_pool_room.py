"""The memory that must be left next to a KV pool."""

import pytest

from engine.memory.memory_plan import blocks_for_others


@pytest.mark.parametrize(
    ("longest", "affordable", "reach", "blocks"),
    [
        (163_840, 100_000, None, 512),
        (163_840, 1_000, None, 100),
        (1_000, 100_000, None, 16),
        (163_840, 9, None, 0),
        (163_840, 1_000, 100_000, 1_563),
        (1_000, 1_000, 100_000, 16),
    ],
)
def test_prompts_of_other_ranks_have_room_for_their_keys(
    longest: int, affordable: int, reach: int | None, blocks: int
) -> None:
    """Room for the keys of usual prompts, but at most a tenth of the affordable blocks, unless it is configured."""
    assert blocks_for_others(longest, affordable, reach) == blocks
