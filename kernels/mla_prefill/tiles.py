"""The tiles of queries that our Hopper kernel computes one by one: those that see most keys come first."""

from collections.abc import Sequence
from itertools import accumulate

# Queries of a tile: `cuda/rows.cuh` has the same.
QUERIES = 128
# Keys of a block that is quantized together, and of a step of our FP8 kernel: `cuda/fp8_tiles.cuh` has the same.
BLOCK_KEYS = 160

# A tile: its first query among those of all prompts, and how many it has; its prompt's first key (first block of keys,
# where keys are quantized), and how many keys its last query sees.
Tile = tuple[int, int, int, int]
# A block: its first key among those of all prompts, and how many it has.
Block = tuple[int, int]


def cut_blocks(key_lengths: Sequence[int]) -> list[Block]:
    """Cut each prompt's keys into blocks of BLOCK_KEYS, the last of them perhaps with fewer."""
    return [
        (first_key + start, min(BLOCK_KEYS, keys - start))
        for keys, first_key in zip(key_lengths, accumulate(key_lengths, initial=0), strict=False)
        for start in range(0, keys, BLOCK_KEYS)
    ]


def cut_tiles(query_lengths: Sequence[int], key_lengths: Sequence[int], *, in_blocks: bool = False) -> list[Tile]:
    """Cut each prompt into tiles. A CTA takes the next tile when it is done, so a long tile must not start last.

    in_blocks: where a prompt's keys begin is counted in blocks of `cut_blocks`.
    """
    tiles: list[Tile] = []
    sizes = [-(-keys // BLOCK_KEYS) for keys in key_lengths] if in_blocks else key_lengths
    first_queries, first_keys = accumulate(query_lengths, initial=0), accumulate(sizes, initial=0)
    for queries, keys, first_query, first_key in zip(
        query_lengths, key_lengths, first_queries, first_keys, strict=False
    ):
        for start in range(0, queries, QUERIES):
            count = min(QUERIES, queries - start)
            tiles.append((first_query + start, count, first_key, keys - queries + start + count))
    return sorted(tiles, key=lambda tile: tile[3], reverse=True)
