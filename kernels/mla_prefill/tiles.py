"""The tiles of queries that our Hopper kernel computes one by one: those that see most keys come first."""

from collections.abc import Sequence
from itertools import accumulate

# Queries of a tile, and keys of a block: `cuda/tiles.cuh` has the same.
QUERIES, KEYS = 128, 128

# A tile's first query among all prompts' and its queries; its prompt's first key and the keys that its last query sees.
Tile = tuple[int, int, int, int]


def cut_tiles(query_lengths: Sequence[int], key_lengths: Sequence[int], *, causal: bool) -> list[Tile]:
    """Cut each prompt into tiles. A CTA takes the next tile when it is done, so a long tile must not start last."""
    tiles: list[Tile] = []
    first_queries, first_keys = accumulate(query_lengths, initial=0), accumulate(key_lengths, initial=0)
    for queries, keys, first_query, first_key in zip(
        query_lengths, key_lengths, first_queries, first_keys, strict=False
    ):
        for start in range(0, queries, QUERIES):
            count = min(QUERIES, queries - start)
            seen = keys - queries + start + count if causal else keys
            tiles.append((first_query + start, count, first_key, seen))
    return sorted(tiles, key=lambda tile: tile[3], reverse=True)
