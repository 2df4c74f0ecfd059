"""Which blocks of keys each tile of queries attends to: lines, rounded to blocks."""

import torch

from kernels.sparse_prefill.line_masses import BLOCK_KEYS
from kernels.sparse_prefill.selection import Selection

TILE_QUERIES = 128


def kept_blocks(selection: Selection, queries: int, keys: int, first_query: int) -> torch.Tensor:
    """[heads, tiles, blocks] bool: whether queries of the tile attend to keys of the block.

    A tile is 128 queries from `first_query` on, a block 64 keys. A block is kept if its column is, or if a kept slash
    crosses it within the tile, and never if all of it lies after the tile.
    """
    device = selection.columns.device
    first = first_query + TILE_QUERIES * torch.arange(-(-queries // TILE_QUERIES), device=device).unsqueeze(1)
    last = (first + TILE_QUERIES - 1).clamp(max=first_query + queries - 1)
    index = torch.arange(-(-keys // BLOCK_KEYS), device=device)
    # The distances from the tile's queries to the block's keys, in blocks.
    nearest = ((first - BLOCK_KEYS * index - (BLOCK_KEYS - 1)) // BLOCK_KEYS).clamp(min=0)
    farthest = (last - BLOCK_KEYS * index) // BLOCK_KEYS
    seen = farthest >= 0
    # How many kept slashes are nearer than each distance.
    nearer = torch.nn.functional.pad(selection.slashes.int().cumsum(1, dtype=torch.int32), (1, 0))
    farthest = farthest.clamp(min=-1, max=selection.blocks - 1)
    crossed = nearer[:, farthest + 1] > nearer[:, nearest.clamp(max=selection.blocks)]
    return (crossed | selection.columns[:, None, : len(index)]) & seen
