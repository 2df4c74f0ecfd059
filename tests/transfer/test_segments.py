from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import ConfigError
from transfer.segments import Tile, covers_once, plan_layerwise, plan_whole

Plan = Callable[[int, int, int, int], list[Tile]]
sizes = st.tuples(st.integers(1, 12), st.integers(0, 40), st.integers(1, 50), st.integers(1, 500))


@given(sizes, st.sampled_from([plan_whole, plan_layerwise]))
def test_a_plan_has_each_layer_of_each_block_once(size: tuple[int, int, int, int], plan: Plan) -> None:
    layers, blocks, piece_bytes, spare = size
    segment_bytes = piece_bytes + spare
    tiles = plan(layers, blocks, piece_bytes, segment_bytes)
    assert covers_once(tiles, layers, blocks)
    assert all(tile.pieces * piece_bytes <= segment_bytes for tile in tiles)


@given(sizes, st.sampled_from([plan_whole, plan_layerwise]))
def test_early_blocks_come_first(size: tuple[int, int, int, int], plan: Plan) -> None:
    layers, blocks, piece_bytes, spare = size
    tiles = plan(layers, blocks, piece_bytes, piece_bytes + spare)
    assert tiles == sorted(tiles, key=lambda tile: (tile.first_block, tile.first_layer))


def test_a_whole_plan_splits_only_blocks_that_do_not_fit() -> None:
    assert plan_whole(4, 5, 10, 80) == [Tile(0, 4, 0, 2), Tile(0, 4, 2, 2), Tile(0, 4, 4, 1)]
    assert plan_whole(4, 1, 10, 30) == [Tile(0, 3, 0, 1), Tile(3, 1, 0, 1)]


def runs_of(blocks: int, longest: int) -> list[int]:
    return [tile.block_count for tile in plan_whole(4, blocks, 10, 40 * longest)]


@given(st.integers(1, 50), st.data())
def test_few_or_short_segments_are_few_and_of_equal_length(longest: int, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, 12 * longest if longest < 4 else 2 * longest))
    counts = runs_of(blocks, longest)
    assert len(counts) == -(-blocks // longest)
    assert max(counts) - min(counts) <= 1


@given(st.integers(4, 50), st.data())
def test_many_segments_begin_with_half_slots_and_end_with_quarters(longest: int, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(2 * longest + 1, 12 * longest))
    first, *between, last = runs_of(blocks, longest)
    assert (first, last) == (longest // 2, longest // 4)
    assert len(between) == -(-(blocks - first - last) // longest)
    assert max(between) - min(between) <= 1


@given(st.integers(1, 600), st.integers(1, 50))
def test_layerwise_runs_are_few_and_of_equal_length(blocks: int, longest: int) -> None:
    counts = [tile.block_count for tile in plan_layerwise(8, blocks, 10, 10 * longest) if tile.first_layer == 0]
    assert len(counts) == -(-blocks // longest)
    assert max(counts) - min(counts) <= 1


def test_a_layerwise_plan_sends_an_eighth_of_the_layers_first() -> None:
    tiles = plan_layerwise(16, 4, 10, 1000)
    assert [tile.layer_count for tile in tiles] == [2] * 8


def test_a_slot_smaller_than_a_piece_is_refused() -> None:
    with pytest.raises(ConfigError, match="slot_bytes"):
        plan_whole(1, 1, 101, 100)


@pytest.mark.parametrize(
    "tiles",
    [
        [Tile(0, 2, 0, 3)],
        [Tile(0, 2, 0, 4), Tile(0, 1, 0, 1)],
        [Tile(0, 1, 0, 4), Tile(0, 1, 0, 4)],
        [Tile(0, 2, 0, 5)],
        [Tile(0, 3, 0, 4)],
        [],
    ],
)
def test_tiles_with_gaps_repeats_or_overruns_do_not_cover(tiles: list[Tile]) -> None:
    assert not covers_once(tiles, 2, 4)
