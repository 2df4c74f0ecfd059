"""Lists of the blocks that each tile of queries attends to, in Triton: what `blocks.kept_blocks` keeps."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.sparse_prefill.blocks import TILE_QUERIES
from kernels.sparse_prefill.line_masses import BLOCK_KEYS
from kernels.sparse_prefill.selection import Selection

# How many blocks a program looks at at a time.
TOGETHER = 1024


class BlockLists(NamedTuple):
    # [heads, tiles, blocks] int16: the kept blocks in falling order, then anything.
    lists: torch.Tensor
    # [heads, tiles, 2] int32: how many of them not all of the tile's queries see whole, at most three, which come
    # first; and how many there are.
    counts: torch.Tensor


# A program lists the blocks of one tile and head.
@triton.jit(do_not_specialize=["queries", "keys", "first_query", "lines", "blocks"])
def _list(
    columns, nearer, lists, counts, queries, keys, first_query, lines, blocks,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    first = first_query + tile * QUERIES
    last = tl.minimum(first + QUERIES, first_query + queries) - 1
    place = head.to(tl.int64) * tl.num_programs(0) + tile
    lists += place * blocks
    columns += head * lines
    nearer += head * (lines + 1)
    reached = tl.minimum(blocks, (last + KEYS) // KEYS)
    count = 0
    partial = 0
    for start in range(0, reached, TOGETHER):
        block = reached - 1 - start - tl.arange(0, TOGETHER)
        known = block >= 0
        # The distances from the tile's queries to the block's keys, in blocks.
        near = tl.maximum(first - block * KEYS - (KEYS - 1), 0) // KEYS
        far = tl.where(known, last - block * KEYS, 0) // KEYS
        column = tl.load(columns + block, mask=known, other=0) != 0
        kept_nearer = tl.load(nearer + tl.minimum(near, lines), mask=known, other=0)
        crossed = tl.load(nearer + tl.minimum(far + 1, lines), mask=known, other=0) > kept_nearer
        kept = known & (column | crossed)
        whole = ((block + 1) * KEYS <= first + 1) & ((block + 1) * KEYS <= keys)
        number = kept.to(tl.int32)
        tl.store(lists + count + tl.cumsum(number, 0) - 1, block.to(tl.int16), mask=kept)
        count += tl.sum(number, 0)
        partial += tl.sum((kept & ~whole).to(tl.int32), 0)
    tl.store(counts + place * 2, partial)
    tl.store(counts + place * 2 + 1, count)


def list_blocks(selection: Selection, queries: int, keys: int, first_query: int) -> BlockLists:
    """The blocks that `kept_blocks` keeps."""
    heads, device = selection.heads, selection.columns.device
    tiles, blocks = -(-queries // TILE_QUERIES), -(-keys // BLOCK_KEYS)
    assert blocks < 1 << 15
    lists = torch.empty(heads, tiles, blocks, dtype=torch.int16, device=device)
    counts = torch.empty(heads, tiles, 2, dtype=torch.int32, device=device)
    # How many kept slashes are nearer than each distance.
    nearer = torch.nn.functional.pad(selection.slashes.cumsum(1, dtype=torch.int32), (1, 0))
    if tiles:
        _list[(tiles, heads)](
            selection.columns.contiguous().view(torch.uint8), nearer, lists, counts, queries, keys, first_query,
            selection.blocks, blocks, TILE_QUERIES, BLOCK_KEYS, TOGETHER,
        )  # fmt: skip
    return BlockLists(lists, counts)
