"""Attention over ragged prompts in Triton (Dao, "FlashAttention-2", 2023)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.hopper import shared_bytes
from kernels.mla_prefill.plan import PrefillPlan
from kernels.tile_sizes import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class Tiling:
    """How many queries a program has, how many keys it reads at a time, and how many such blocks are under way."""

    queries: int
    keys: int
    stages: int

    def shared_bytes(self, widths: Sequence[int], item_bytes: int) -> int:
        """Shared memory that a program takes. widths: padded; own and shared channels of keys, and values."""
        own, rope, value = widths
        return (self.queries * (own + rope) + self.stages * self.keys * (own + rope + value)) * item_bytes


# The quickest on Hopper first; then what cards with less shared memory hold.
TILINGS = (
    Tiling(128, 64, 3),
    Tiling(128, 64, 2),
    Tiling(128, 32, 2),
    Tiling(128, 64, 1),
    Tiling(64, 32, 2),
    Tiling(64, 32, 1),
    Tiling(32, 32, 1),
    Tiling(16, 16, 1),
)


def choose_tiling(widths: Sequence[int], item_bytes: int, shared_bytes: int, keys: int | None = None) -> Tiling:
    """The first of TILINGS whose program has room. keys: read that many at a time, with as many stages as have room."""
    tilings = TILINGS if keys is None else [Tiling(128, keys, stages) for stages in (3, 2, 1)]
    # In float32 products need the room of a second stage.
    usable = [tiling for tiling in tilings if item_bytes < 4 or tiling.stages == 1]
    fitting = (tiling for tiling in usable if tiling.shared_bytes(widths, item_bytes) <= shared_bytes)
    return next(fitting, usable[-1])


# A program attends with 128 queries of one head to 64 keys at a time: first the keys that all its queries see, then the
# diagonal. Programs of later queries, which see more keys, start first. 2 * (key width + value width) FLOPs a score.
# Keys and values come from the cache, since the programs of a head share them.
@triton.jit
def _attend(
    query, nope, rope, value, out, query_starts, key_starts, query_row, query_head, nope_row, nope_head,
    rope_row, value_row, value_head, out_row, out_head, scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, PADDED_NOPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr, PADDED_VALUE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    prompt = tl.program_id(2)
    head = tl.program_id(1)
    first_query, first_key = tl.load(query_starts + prompt), tl.load(key_starts + prompt)
    queries = tl.load(query_starts + prompt + 1) - first_query
    keys = tl.load(key_starts + prompt + 1) - first_key
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if start >= queries:
        return
    own = start + tl.arange(0, QUERIES)
    known = own < queries
    column = tl.arange(0, PADDED_VALUE)
    query += (first_query + own[:, None]).to(tl.int64) * query_row + head * query_head
    query_nope, query_rope = load_queries(query, known, NOPE, ROPE, PADDED_NOPE, PADDED_ROPE)
    nope += first_key.to(tl.int64) * nope_row + head * nope_head
    rope += first_key.to(tl.int64) * rope_row
    value += first_key.to(tl.int64) * value_row + head * value_head
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sum_values = tl.zeros([QUERIES, PADDED_VALUE], tl.float32)
    # The last key that each query sees.
    last_key = keys - queries + own
    stop = tl.minimum(keys - queries + start + QUERIES, keys)
    unmasked = tl.minimum(keys - queries + start + 1, keys) // KEYS * KEYS
    for at in range(0, unmasked, KEYS):
        largest, total, sum_values = attend_to_block(
            query_nope, query_rope, nope, rope, value, nope_row, rope_row, value_row, at, keys, last_key, column, scale,
            largest, total, sum_values, False, NOPE, ROPE, VALUE, KEYS,
        )  # fmt: skip
    for at in range(unmasked, stop, KEYS):
        largest, total, sum_values = attend_to_block(
            query_nope, query_rope, nope, rope, value, nope_row, rope_row, value_row, at, keys, last_key, column, scale,
            largest, total, sum_values, True, NOPE, ROPE, VALUE, KEYS,
        )  # fmt: skip
    target = (first_query + own).to(tl.int64)
    tl.store(
        out + target[:, None] * out_row + head * out_head + column[None, :],
        (sum_values / total[:, None]).to(out.dtype.element_ty), mask=known[:, None] & (column < VALUE)[None, :],
    )  # fmt: skip


@triton.jit
def load_queries(
    query, known,
    NOPE: tl.constexpr, ROPE: tl.constexpr, PADDED_NOPE: tl.constexpr, PADDED_ROPE: tl.constexpr,
):  # fmt: skip
    """query: [queries, 1] pointers. Returns both parts, [queries, PADDED_NOPE] and [queries, PADDED_ROPE]."""
    straight, turned = tl.arange(0, PADDED_NOPE)[None, :], tl.arange(0, PADDED_ROPE)[None, :]
    query_nope = tl.load(query + straight, mask=known[:, None] & (straight < NOPE), other=0.0)
    return query_nope, tl.load(query + NOPE + turned, mask=known[:, None] & (turned < ROPE), other=0.0)


@triton.jit
def attend_to_block(
    query_nope, query_rope, nope, rope, value, nope_row, rope_row, value_row, at, keys, last_key, column, scale,
    largest, total, sum_values,
    MASKED: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    own = at + tl.arange(0, KEYS)
    inside = own < keys
    row = own.to(tl.int64)
    straight, turned = tl.arange(0, query_nope.shape[1])[:, None], tl.arange(0, query_rope.shape[1])[:, None]
    key_nope = tl.load(nope + row[None, :] * nope_row + straight, mask=inside[None, :] & (straight < NOPE), other=0.0)
    key_rope = tl.load(rope + row[None, :] * rope_row + turned, mask=inside[None, :] & (turned < ROPE), other=0.0)
    place, held = value + row[:, None] * value_row + column[None, :], inside[:, None] & (column < VALUE)[None, :]
    # Values are loaded before the scores, so that they lie in shared memory next to the keys and not in their place. If
    # strides keep Triton from copying asynchronously, values would take the place of keys. ptxas 12.8, which Triton 3.6
    # brings, then computes the descriptors of the values' products on Hopper from uniform registers that nothing wrote:
    # outputs are wrong, and reads leave shared memory. Products in float32 have no descriptors and need the room.
    if value.dtype.element_ty != tl.float32:
        values = tl.load(place, mask=held, other=0.0)
    scores = tl.dot(query_nope, key_nope, input_precision="ieee")
    scores = tl.dot(query_rope, key_rope, scores, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where((own[None, :] <= last_key[:, None]) & inside[None, :], scores, float("-inf"))
    now = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - now[:, None])
    alpha = tl.exp2(largest - now)
    if value.dtype.element_ty == tl.float32:
        values = tl.load(place, mask=held, other=0.0)
    sum_values = tl.dot(weights.to(values.dtype), values, sum_values * alpha[:, None], input_precision="ieee")
    return now, total * alpha + tl.sum(weights, axis=1), sum_values


def mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    scale: float,
) -> None:
    queries, heads, _ = query.shape
    if not queries:
        return
    widths = own.shape[2], shared.shape[1], value.shape[2]
    padded = tuple(padded_widths(widths))
    tiling = choose_tiling(padded, query.element_size(), shared_bytes(query.device))
    _attend[(cdiv(max(plan.query_lengths), tiling.queries), heads, len(plan.query_lengths))](
        query, own, shared, value, out, plan.query_starts, plan.key_starts,
        query.stride(0), query.stride(1), own.stride(0), own.stride(1), shared.stride(0), value.stride(0),
        value.stride(1), out.stride(0), out.stride(1), scale * math.log2(math.e),
        *widths, *padded, tiling.queries, tiling.keys, num_warps=8, num_stages=tiling.stages,
    )  # fmt: skip


def padded_widths(widths: Iterable[int]) -> Iterator[int]:
    """The widths that products take: powers of two, and 16 or more."""
    return (max(next_power_of_2(width), 16) for width in widths)
