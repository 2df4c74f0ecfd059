"""Attention of a few tokens with few heads over a bf16 pool on Hopper, in Triton: it is limited by its latency.

A multiprocessor attends to one block of a context, or to a few of a long one, and the heads are the narrow side of its
products. `bf16_decode.cu` computes 64 rows of heads whatever their number, in a chain of several roles.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.hopper import is_hopper
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode.attended import Attended, EvenPieces
from kernels.mla_decode.plan import DecodePlan
from kernels.tile_sizes import next_power_of_2

LATENT, ROPE, MOST_HEADS, FEWEST_ROWS = 512, 64, 32, 16
# None yet: it was never run on a GPU.
MOST_TOKENS = 0
# Pieces of all tokens together: about as many as there are multiprocessors.
PIECES, WARPS, STAGES = 128, 8, 2
# Values that the second-level cache brings at once.
LINE = 16


# A program attends to some blocks of one token's context with all heads. Reads 1,152 bytes a token of the context.
# Programs without blocks leave a sum of nothing.
@triton.jit
def _attend(
    query, pool, block_table, lengths, values, log_sums, table_stride, query_tokens, heads, scale, SPLITS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LINE: tl.constexpr,
    LINES: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    split, token = tl.program_id(0), tl.program_id(1)
    row, head = token // query_tokens, tl.arange(0, HEADS)
    own, turned, place = tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE), tl.arange(0, BLOCK)
    known, width = (head < heads)[:, None], LATENT + ROPE
    # The plan is older than the kernel before.
    length = tl.load(lengths + row) - (query_tokens - 1 - token % query_tokens)
    each = tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK), SPLITS), 1)
    begin = split * each
    end = tl.minimum(begin + each, tl.cdiv(length, BLOCK))
    table = block_table + row.to(tl.int64) * table_stride
    block = tl.load(table + begin, mask=begin < end, other=0).to(tl.int64)
    # Brings the first block to the second-level cache by a value of each sector, which nothing uses: a block may still
    # be written, in that cache too.
    lines = (tl.arange(0, LINES) * LINE)[None, :]
    warmed = lines < tl.where(begin < end, width, 0)
    tl.load(pool + (block * BLOCK + place)[:, None] * width + lines, mask=warmed, volatile=True)
    wait_for_earlier(DEPENDENT)
    source = query + (token * heads + head)[:, None] * width
    latent_query = tl.load(source + own[None, :], mask=known, other=0.0)
    rope_query = tl.load(source + turned[None, :], mask=known, other=0.0)
    largest, total = tl.full([HEADS], -1e30, tl.float32), tl.zeros([HEADS], tl.float32)
    attended = tl.zeros([HEADS, LATENT], tl.float32)
    for at in tl.range(begin, end, num_stages=STAGES):
        line = pool + (block * BLOCK + place)[:, None] * width
        # A block's last tokens may be anything, and anything times nothing must be nothing.
        seen = at * BLOCK + place < length
        latents = tl.load(line + own[None, :], mask=seen[:, None], other=0.0)
        keys = tl.load(line + turned[None, :], mask=seen[:, None], other=0.0)
        block = tl.load(table + at + 1, mask=at + 1 < end, other=0).to(tl.int64)
        scores = tl.dot(rope_query, tl.trans(keys), tl.dot(latent_query, tl.trans(latents))) * scale
        scores = tl.where(seen[None, :], scores, -1e30)
        before = largest
        largest = tl.maximum(before, tl.max(scores, axis=1))
        weights, kept = tl.exp2(scores - largest[:, None]), tl.exp2(before - largest)
        total = total * kept + tl.sum(weights, axis=1)
        attended = tl.dot(weights.to(latents.dtype), latents, attended * kept[:, None])
    target = (token * SPLITS + split) * heads + head
    if begin < end:
        attended = attended / total[:, None]
        tl.store(values + target[:, None] * LATENT + own[None, :], attended.to(values.dtype.element_ty), mask=known)
    tl.store(log_sums + target, tl.where(total > 0, largest + tl.log2(total), -1e30), mask=head < heads)


def takes(query: torch.Tensor, pool: torch.Tensor, value_width: int) -> bool:
    """Whether there are few tokens with few heads, of DeepSeek's widths."""
    widths = (value_width, pool.shape[2]) == (LATENT, LATENT + ROPE) and query.shape[1] <= MOST_HEADS
    return is_hopper() and pool.dtype == query.dtype == torch.bfloat16 and 0 < len(query) <= MOST_TOKENS and widths


def attend(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> Attended:
    """As `kernels.mla_decode.mla_decode`, for what it `takes`."""
    (tokens, heads, _), device = query.shape, query.device
    splits = PIECES // tokens
    values = torch.empty(tokens * splits, heads, LATENT, dtype=query.dtype, device=device)
    log_sums = torch.empty(tokens * splits, heads, dtype=torch.float32, device=device)
    launch(_attend, (splits, tokens), device,
        query, pool, plan.block_table, plan.lengths, values, log_sums, plan.block_table.stride(0), plan.query_tokens,
        heads, scale * math.log2(math.e), splits, max(next_power_of_2(heads), FEWEST_ROWS), BLOCK_TOKENS, LATENT, ROPE,
        LINE, next_power_of_2((LATENT + ROPE) // LINE), STAGES, num_warps=WARPS,
    )  # fmt: skip
    latents = torch.empty(tokens, heads, LATENT, dtype=query.dtype, device=device)
    return Attended(latents, EvenPieces(latents, values, log_sums, plan.lengths, plan.query_tokens, splits))
