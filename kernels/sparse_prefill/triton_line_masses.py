"""How much attention lies on each line, in Triton: two passes over the keys, and no scores in memory."""

import math

import torch
import triton
import triton.language as tl

from kernels.sparse_prefill.line_masses import BLOCK_KEYS, LineMasses
from kernels.tile_sizes import cdiv

# Queries of a head: its rows of a tile of scores. Fewer are padded.
QUERIES = 64
# Keys of a tile, and tiles of a program's run in the first pass.
KEYS, RUN = 128, 8
# What the products take of the width at a time.
STEP = 64
LOG2_E = math.log2(math.e)


# A tile: 64 queries each of HEADS heads against 128 keys, a product of 128 x 128 if the heads share their keys. Rows
# and keys are read again for each tile, from the L2 cache: all programs that share a tile's keys start together.
@triton.jit
def _scores(
    query, key, query_row, query_head, key_row, key_head, head, heads, at, queries, keys, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row, own = tl.arange(0, HEADS * QUERIES), at + tl.arange(0, KEYS)
    known = (row % QUERIES < queries) & (head + row // QUERIES < heads)
    inside = own < keys
    source = query + (row % QUERIES).to(tl.int64) * query_row + (head + row // QUERIES).to(tl.int64) * query_head
    # With several heads to a program they share their keys: key_head is 0.
    target = key + own.to(tl.int64) * key_row + head.to(tl.int64) * key_head
    scores = tl.zeros([HEADS * QUERIES, KEYS], tl.float32)
    for start in range(0, WIDTH, STEP):
        column = start + tl.arange(0, STEP)
        within = column < WIDTH
        left = tl.load(source[:, None] + column[None, :], mask=known[:, None] & within[None, :], other=0.0)
        right = tl.load(target[None, :] + column[:, None], mask=inside[None, :] & within[:, None], other=0.0)
        scores = tl.dot(left, right, scores, input_precision="ieee")
    seen = (own[None, :] <= (keys - queries + row % QUERIES)[:, None]) & inside[None, :] & known[:, None]
    return tl.where(seen, scores * scale, float("-inf"))


# A program takes the log-sums of its heads' queries over a run of 1,024 keys. 2 * width FLOPs a score; 4 bytes are
# written for 1,024 scores.
@triton.jit(do_not_specialize=["heads", "queries", "keys", "runs"])
def _log_sums(
    query, key, out, query_row, query_head, key_row, key_head, heads, queries, keys, runs, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    head, run = tl.program_id(0) * HEADS, tl.program_id(1)
    row = tl.arange(0, HEADS * QUERIES)
    largest = tl.full([HEADS * QUERIES], -1e30, tl.float32)
    total = tl.zeros([HEADS * QUERIES], tl.float32)
    for tile in range(RUN):
        scores = _scores(
            query, key, query_row, query_head, key_row, key_head, head, heads, (run * RUN + tile) * KEYS, queries, keys,
            scale, WIDTH, HEADS, QUERIES, KEYS, STEP,
        )  # fmt: skip
        now = tl.maximum(largest, tl.max(scores, axis=1))
        total = total * tl.exp2(largest - now) + tl.sum(tl.exp2(scores - now[:, None]), axis=1)
        largest = now
    some = total > 0
    log_sum = tl.where(some, largest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    place = (head * QUERIES + row).to(tl.int64) * runs + run
    tl.store(out + place, log_sum, mask=head + row // QUERIES < heads)


# A program computes the weights of one tile again, and sums them while they are on the chip: 2 * width FLOPs a score.
# For 64 x 64 scores it writes 528 bytes, most of them sums by distance: a block of keys meets 127 distances, of which
# the next block adds to 63. Both parts are written, so that no two programs add to one number.
@triton.jit(do_not_specialize=["heads", "queries", "keys", "blocks", "remainder"])
def _masses(
    query, key, log_sums, columns, parts, distances, query_row, query_head, key_row, key_head, heads, queries, keys,
    blocks, remainder, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head, at = tl.program_id(0) * HEADS, tl.program_id(1) * KEYS
    row = tl.arange(0, HEADS * QUERIES)
    known = (row % QUERIES < queries) & (head + row // QUERIES < heads)
    log_sum = tl.load(log_sums + head * QUERIES + row, mask=known, other=0.0)
    scores = _scores(
        query, key, query_row, query_head, key_row, key_head, head, heads, at, queries, keys, scale,
        WIDTH, HEADS, QUERIES, KEYS, STEP,
    )  # fmt: skip
    SOME: tl.constexpr = KEYS // BLOCK
    weights = tl.exp2(scores - log_sum[:, None]).reshape(HEADS, QUERIES, SOME, BLOCK)
    # By head and block.
    own_head = head + tl.arange(0, HEADS)[:, None]
    block = at // BLOCK + tl.arange(0, SOME)[None, :]
    inside = (own_head < heads) & (block < blocks)
    place = own_head.to(tl.int64) * blocks + block
    tl.store(columns + place, tl.max(tl.sum(weights, axis=1), axis=2), mask=inside)
    which = tl.arange(0, QUERIES)[None, :, None, None]
    member = tl.arange(0, BLOCK)[None, None, None, :]
    # How many blocks of distances behind the middle one.
    line = which + remainder - member
    for neighbour in tl.static_range(3):
        low = (neighbour - 1) * BLOCK
        mine = tl.where((line >= low) & (line < low + BLOCK), weights, 0.0)
        tl.store(parts + place * 3 + neighbour, tl.sum(tl.sum(mine, axis=3), axis=1), mask=inside)
    # Query i's weights in the order of i - key modulo 64, so that those of one distance stand below each other.
    turned = (which - member) & (BLOCK - 1)
    skewed = tl.gather(weights, tl.broadcast_to(turned, [HEADS, QUERIES, SOME, BLOCK]), 3)
    near, far = (place * 2)[:, :, None] * BLOCK, (place * 2 + 1)[:, :, None] * BLOCK
    column = tl.arange(0, BLOCK)[None, None, :]
    tl.store(distances + near + column, tl.sum(tl.where(which >= member, skewed, 0.0), axis=1), mask=inside[:, :, None])
    tl.store(distances + far + column, tl.sum(tl.where(which < member, skewed, 0.0), axis=1), mask=inside[:, :, None])


# A program adds both parts of 64 segments of distances, and takes the heaviest distance of each of their two lines.
# Reads 512 bytes a segment, writes 8.
@triton.jit(do_not_specialize=["blocks", "split"])
def _heaviest(distances, own, behind, blocks, split, BLOCK: tl.constexpr):
    segment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    # By block of keys: first what lies at its own segment, then what lies at the next one.
    place = ((head * blocks + segment) * 2 * BLOCK)[:, None] + column[None, :]
    mass = tl.load(distances + place, mask=(segment < blocks)[:, None], other=0.0)
    mass += tl.load(distances + place - BLOCK, mask=((segment > 0) & (segment <= blocks))[:, None], other=0.0)
    nearer = (column < split)[None, :]
    target = head * (blocks + 1) + segment
    tl.store(own + target, tl.max(tl.where(nearer, mass, 0.0), axis=1), mask=segment <= blocks)
    tl.store(behind + target, tl.max(tl.where(nearer, 0.0, mass), axis=1), mask=segment <= blocks)


def line_masses(query: torch.Tensor, key: torch.Tensor, scale: float) -> LineMasses:
    queries, heads, width = query.shape
    keys, device = key.shape[0], query.device
    shared = key.shape[1] == 1
    together = 2 if shared and heads > 1 else 1
    strides = query.stride(0), query.stride(1), key.stride(0), 0 if shared else key.stride(1)
    settings = {"num_warps": 4 * together, "num_stages": 3 if query.dtype != torch.float32 else 1}
    groups, tiles, blocks = cdiv(heads, together), cdiv(keys, KEYS), cdiv(keys, BLOCK_KEYS)
    runs, first, scale = cdiv(tiles, RUN), keys - queries, scale * LOG2_E
    by_run = torch.empty(heads, QUERIES, runs, dtype=torch.float32, device=device)
    _log_sums[(groups, runs)](
        query, key, by_run, *strides, heads, queries, keys, runs, scale, width, together, QUERIES, KEYS, STEP, RUN,
        **settings,
    )  # fmt: skip
    log_sums = by_run.mul_(1 / LOG2_E).logsumexp(2).mul_(LOG2_E)
    columns = torch.empty(heads, blocks, dtype=torch.float32, device=device)
    parts = torch.empty(heads, blocks, 3, dtype=torch.float32, device=device)
    distances = torch.empty(heads, blocks, 2, BLOCK_KEYS, dtype=torch.float32, device=device)
    _masses[(groups, tiles)](
        query, key, log_sums, columns, parts, distances, *strides, heads, queries, keys, blocks, first % BLOCK_KEYS,
        scale, width, together, QUERIES, KEYS, STEP, BLOCK_KEYS, **settings,
    )  # fmt: skip
    # Segment j, the distances first - 64 j + d, lies in the line middle - j and, from d = split on, in the one behind.
    middle, split = first // BLOCK_KEYS, BLOCK_KEYS - first % BLOCK_KEYS
    heaviest = torch.empty(2, heads, blocks + 1, dtype=torch.float32, device=device)
    _heaviest[(cdiv(blocks + 1, BLOCK_KEYS), heads)](
        distances, *heaviest, blocks, split, BLOCK_KEYS, num_warps=4
    )  # fmt: skip
    segment = middle - torch.arange(blocks, device=device)
    own, behind = (
        part[:, index.clamp(min=0)].masked_fill(index < 0, 0)
        for part, index in zip(heaviest, (segment, segment + 1), strict=True)
    )
    return LineMasses(columns, torch.maximum(own, behind), parts)
