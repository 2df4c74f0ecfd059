"""How much attention lies on each line, in Triton: two passes over the keys, and no scores in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.sparse_prefill.line_masses import BLOCK_KEYS, COMPRESSED, LineMasses
from kernels.sparse_prefill.triton_scores import QUERIES, STEP, TileQueries, held_queries, scores_of, take_queries
from kernels.tile_sizes import cdiv, next_power_of_2

LOG2_E = math.log2(math.e)
# Keys of a log-sum.
RUN = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a pass is tiled."""

    # Keys of a tile, and of a program's run of tiles.
    keys: int
    run: int
    # Loads in flight.
    stages: int
    # The most registers of a thread; None if the compiler decides.
    registers: int | None = None


# By the keys' dtype: the tilings of the log-sums and of the masses.
Tilings = tuple[Tiling, Tiling]
# In e4m3 a program holds its queries. Those of two heads take 72 KB of shared memory, 128 keys as much: there is room
# for them and the next ones, or for two programs with 64 keys, of which one multiplies while the other sums.
COMPRESSED_TILINGS: Tilings = Tiling(128, RUN, 2), Tiling(64, RUN, 1, registers=128)
# A second tile in a program of the masses would take more registers than there are.
TILINGS: Tilings = Tiling(128, RUN, 3), Tiling(128, 128, 3)
FLOAT32_TILINGS: Tilings = Tiling(128, RUN, 1), Tiling(128, 128, 1)


# A program takes the log-sums of its heads' queries over a run of 1,024 keys. 2 * width FLOPs a score; 4 bytes are
# written for 1,024 scores.
@triton.jit(do_not_specialize=["heads", "queries", "keys", "runs"])
def _log_sums(
    values, scales, key, out, key_row, key_head, heads, queries, keys, runs,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, run = tl.program_id(0) * HEADS, tl.program_id(1)
    row = head * QUERIES + tl.arange(0, HEADS * QUERIES)
    # With several heads to a program they share their keys: key_head is 0.
    key += head.to(tl.int64) * key_head
    first, rest = held_queries(values, row, WIDTH, FIRST, REST)
    scale = tl.load(scales + row)
    largest = tl.full([HEADS * QUERIES], -1e30, tl.float32)
    total = tl.zeros([HEADS * QUERIES], tl.float32)
    for at in range(run * RUN, run * RUN + RUN, KEYS):
        scores = scores_of(
            first, rest, scale, key, key_row, row, at, queries, keys, WIDTH, FIRST, REST, QUERIES, KEYS, STEP
        )
        now = tl.maximum(largest, tl.max(scores, axis=1))
        total = total * tl.exp2(largest - now) + tl.sum(tl.exp2(scores - now[:, None]), axis=1)
        largest = now
    some = total > 0
    log_sum = tl.where(some, largest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(out + row.to(tl.int64) * runs + run, log_sum, mask=row < heads * QUERIES)


# A program computes the weights of a run again, and sums them while they are on the chip: 2 * width FLOPs a score. For
# 64 x 64 scores it writes 528 bytes, most of them sums by distance: a block of keys meets 127 distances, of which the
# next block adds to 63. Both parts are written, so that no two programs add to one number.
@triton.jit(do_not_specialize=["heads", "queries", "keys", "blocks", "remainder"])
def _masses(
    values, scales, key, log_sums, columns, parts, distances, key_row, key_head, heads, queries, keys, blocks,
    remainder,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, run = tl.program_id(0) * HEADS, tl.program_id(1)
    row = head * QUERIES + tl.arange(0, HEADS * QUERIES)
    key += head.to(tl.int64) * key_head
    first, rest = held_queries(values, row, WIDTH, FIRST, REST)
    scale = tl.load(scales + row)
    # Missing queries have no weights.
    known = (row % QUERIES < queries) & (row < heads * QUERIES)
    log_sum = tl.load(log_sums + row, mask=known, other=float("inf"))
    SOME: tl.constexpr = KEYS // BLOCK
    which = tl.arange(0, QUERIES)[None, :, None, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    # Query i's weights in the order of i - key modulo 64, so that those of one distance stand below each other: those
    # of distances from 0 on, `near`, and those from -64 on, `far`.
    turned = tl.broadcast_to((which - column[:, :, None, :]) & (BLOCK - 1), [HEADS, QUERIES, SOME, BLOCK])
    own_head = head + tl.arange(0, HEADS)[:, None]
    for at in range(run * RUN, run * RUN + RUN, KEYS):
        scores = scores_of(
            first, rest, scale, key, key_row, row, at, queries, keys, WIDTH, FIRST, REST, QUERIES, KEYS, STEP
        )
        weights = tl.exp2(scores - log_sum[:, None]).reshape(HEADS, QUERIES, SOME, BLOCK)
        block = at // BLOCK + tl.arange(0, SOME)[None, :]
        inside = (own_head < heads) & (block < blocks)
        place = own_head.to(tl.int64) * blocks + block
        tl.store(columns + place, tl.max(tl.sum(weights, axis=1), axis=2), mask=inside)
        skewed = tl.gather(weights, turned, 3)
        is_near = which >= column[:, :, None, :]
        near = tl.sum(tl.where(is_near, skewed, 0.0), axis=1)
        far = tl.sum(tl.where(is_near, 0.0, skewed), axis=1)
        target = distances + (place * 2 * BLOCK)[:, :, None] + column
        tl.store(target, near, mask=inside[:, :, None])
        tl.store(target + BLOCK, far, mask=inside[:, :, None])
        # The blocks of distances that the block of keys meets, nearest first.
        nearer = column < BLOCK - remainder
        tl.store(parts + place * 3, tl.sum(tl.where(nearer, far, 0.0), axis=2), mask=inside)
        tl.store(parts + place * 3 + 1, tl.sum(tl.where(nearer, near, far), axis=2), mask=inside)
        tl.store(parts + place * 3 + 2, tl.sum(tl.where(nearer, 0.0, near), axis=2), mask=inside)


# A program adds both parts of the distances of 64 lines, and takes each line's heaviest. Segment j, the distances
# first - 64 j + d, lies in the line middle - j and, from d = split on, in the next line. Reads 512 bytes a line, and
# writes 4.
@triton.jit(do_not_specialize=["blocks", "middle", "split"])
def _heaviest(distances, slashes, blocks, middle, split, BLOCK: tl.constexpr):
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, column = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    largest = tl.zeros([BLOCK], tl.float32)
    for following in tl.static_range(2):
        segment = (middle - line + following)[:, None]
        mine = (column >= split) if following else (column < split)
        # By block of keys: first what lies at its own segment, then what lies at the next one.
        place = distances + (head * blocks + segment) * 2 * BLOCK + column
        mass = tl.load(place, mask=mine & (segment >= 0) & (segment < blocks), other=0.0)
        mass += tl.load(place - BLOCK, mask=mine & (segment > 0) & (segment <= blocks), other=0.0)
        largest = tl.maximum(largest, tl.max(mass, axis=1))
    tl.store(slashes + head * blocks + line, largest, mask=line < blocks)


@dataclass(frozen=True, slots=True)
class _Passes:
    """The inputs of both passes."""

    queries: TileQueries
    key: torch.Tensor
    # How many heads a program has.
    together: int

    def launch(self, kernel: triton.JITFunction, tiling: Tiling, sizes: Sequence[int], *results: torch.Tensor) -> None:
        """sizes: what the kernel is given after the strides, except its tiles."""
        keys, width = self.key.shape[0], self.key.shape[2]
        strides = self.key.stride(0), 0 if self.key.shape[1] == 1 else self.key.stride(1)
        held = _held_widths(width) if self.key.dtype == COMPRESSED else (0, 0)
        grid = self.queries.values.shape[0] // self.together, cdiv(keys, tiling.run)
        kernel[grid](
            self.queries.values, self.queries.scales, self.key, *results, *strides, *sizes,
            width, *held, self.together, QUERIES, tiling.keys, STEP, tiling.run, BLOCK_KEYS,
            num_warps=4 * self.together, num_stages=tiling.stages, maxnreg=tiling.registers,
        )  # fmt: skip


def line_masses(query: torch.Tensor, key: torch.Tensor, scale: float) -> LineMasses:
    (queries, heads, _), (keys, device) = query.shape, (key.shape[0], query.device)
    together = 2 if key.shape[1] == 1 and heads > 1 else 1
    passes = _Passes(take_queries(query, key.dtype, scale * LOG2_E, together), key, together)
    of_sums, of_masses = _tilings(key.dtype)
    runs, blocks, first = cdiv(keys, RUN), cdiv(keys, BLOCK_KEYS), keys - queries
    by_run = torch.empty(heads, QUERIES, runs, dtype=torch.float32, device=device)
    passes.launch(_log_sums, of_sums, (heads, queries, keys, runs), by_run)
    log_sums = by_run.mul_(1 / LOG2_E).logsumexp(2).mul_(LOG2_E)
    columns, slashes = torch.empty(2, heads, blocks, dtype=torch.float32, device=device)
    parts = torch.empty(heads, blocks, 3, dtype=torch.float32, device=device)
    distances = torch.empty(heads, blocks, 2, BLOCK_KEYS, dtype=torch.float32, device=device)
    middle, remainder = divmod(first, BLOCK_KEYS)
    passes.launch(_masses, of_masses, (heads, queries, keys, blocks, remainder), log_sums, columns, parts, distances)
    _heaviest[(cdiv(blocks, BLOCK_KEYS), heads)](
        distances, slashes, blocks, middle, BLOCK_KEYS - remainder, BLOCK_KEYS, num_warps=4
    )
    return LineMasses(columns, slashes, parts)


def _tilings(dtype: torch.dtype) -> Tilings:
    if dtype == COMPRESSED:
        return COMPRESSED_TILINGS
    return FLOAT32_TILINGS if dtype == torch.float32 else TILINGS


def _held_widths(width: int) -> tuple[int, int]:
    """The width in two parts as products take them, powers of two: all but the end, and the end."""
    first = 1 << (width.bit_length() - 1)
    return first, max(next_power_of_2(width - first), 32)
