"""The places of a region, and how work is divided between channels; without a GPU."""

import re
from pathlib import Path

import pytest

from kernels.peer_exchange import region
from kernels.peer_exchange.region import (
    CHANNELS,
    MOST_RANKS,
    MOST_THREADS,
    MOST_WORD_UNITS,
    SLOT_CHANNELS,
    SLOT_UNITS,
    WORD_UNITS,
    region_bytes,
    slot_blocks,
    template_ranks,
    unit_blocks,
    word_bytes,
)


def source_constants() -> dict[str, int]:
    source = Path(region.__file__).parent / "cuda" / "peers.cuh"
    found: dict[str, int] = {}
    for line in re.findall(r"^constexpr int (.+);", source.read_text(), re.MULTILINE):
        for name, value in re.findall(r"(\w+) = ([^,]+)", line):
            found[name] = eval(value, {}, found)
    return found


def test_python_and_the_source_agree_on_the_region() -> None:
    constants = source_constants()
    assert len(constants) > 10 and constants == {name: getattr(region, name) for name in constants}


@pytest.mark.parametrize("units", [1, 127, 128, 129, 16385, 32769, 65537, MOST_WORD_UNITS])
def test_units_fit_their_blocks_and_no_block_is_idle(units: int) -> None:
    blocks, threads, turn_units = unit_blocks(units)
    assert (blocks - 1) * turn_units < units <= blocks * turn_units and turn_units % 32 == 0
    assert blocks <= CHANNELS and turn_units <= WORD_UNITS and threads <= MOST_THREADS


@pytest.mark.parametrize("units", [0, 1, 512, 513, 100_000, 131_072, 131_073, 262_145, 10**9])
def test_every_turn_fits_its_slot_and_no_block_is_idle(units: int) -> None:
    blocks, turn_units = slot_blocks(units)
    assert 1 <= blocks <= SLOT_CHANNELS and turn_units <= SLOT_UNITS
    assert (blocks - 1) * turn_units < max(units, 1)
    # Fewer blocks than channels do everything in one turn.
    assert blocks == SLOT_CHANNELS or blocks * turn_units >= units


def test_each_number_of_ranks_has_a_kernel() -> None:
    assert [template_ranks(ranks) for ranks in range(2, MOST_RANKS + 1)] == [2, 4, 4, 8, 8, 8, 8]


def test_words_lie_within_the_region_of_a_group() -> None:
    assert region_bytes(1) == 0 and word_bytes(1) == slice(0, 0)
    for ranks in range(2, MOST_RANKS + 1):
        words = word_bytes(ranks)
        assert 0 < words.start < words.stop < region_bytes(ranks)
