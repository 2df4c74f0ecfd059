"""Draws tokens in Triton: one launch, no sort; the likeliest ones in two, by parts of rows.

top_k and top_p keep all logits above a threshold and some of those equal to it. The threshold is found bit by bit, by
counting the logits, or summing the probability, at or above it.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier
from kernels.sample.draws import Draws
from kernels.sample.penalties import IN_PROMPT, Penalties
from kernels.tile_sizes import cdiv, next_power_of_2

BLOCK = 16384
PENALTY_BLOCK = 4096
# Logits of a part: DeepSeek's vocabulary is 32 of them, so that one row alone is read by 32 multiprocessors.
PART = 4096
# Lower temperatures are raised to this one: no logit but the highest has any probability left.
COLDEST = 1e-30
ROUNDS = 10
# These are rows of one packed tensor, which begin at a multiple of 16 bytes for some numbers of rows only. One number a
# row is read of each, so that the machine code is the same.
DRAW_POINTERS = ["temperatures", "top_ps", "min_ps", "top_ks", "seeds", "positions"]
PENALTY_POINTERS = ["repetitions", "presences", "frequencies"]


# One program does a row. It reads it from the second-level cache some ten times, about 0.26 MB each time for DeepSeek's
# vocabulary in bf16, with one exponential a logit whenever it sums probability.
@triton.jit(do_not_specialize_on_alignment=DRAW_POINTERS)
def _draw(
    logits, temperatures, top_ps, min_ps, top_ks, seeds, positions, out,
    vocabulary, row_stride, BITS: tl.constexpr, BLOCK: tl.constexpr, COLDEST: tl.constexpr, ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    source = logits + row * row_stride
    temperature = tl.maximum(tl.load(temperatures + row).to(tl.float32), COLDEST)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row).to(tl.float32)
    highest = _highest(source, vocabulary, BLOCK)
    # Everything is above this threshold: nothing is excluded.
    threshold = tl.zeros((), tl.int64)
    ties = vocabulary.to(tl.int64)
    if min_p > 0:
        # Keeps all logits above this key; no logit has the key itself.
        threshold = _key(highest + temperature * tl.log(min_p)) - 1
        ties = tl.zeros((), tl.int64)
    if top_k > 0 and top_k < vocabulary:
        found = _search(source, vocabulary, highest, temperature, top_k.to(tl.float32), True, BITS, BLOCK)
        if found > threshold:
            threshold = found
            above = _sum(source, vocabulary, highest, temperature, threshold + 1, True, BLOCK)
            ties = top_k - above.to(tl.int64)
    mass = _sum(source, vocabulary, highest, temperature, threshold + 1, False, BLOCK)
    each = _probability(_value(threshold), highest, temperature)
    # Without top_k and min_p the threshold is the lowest key of all, which no logit has.
    total = mass + tl.where(threshold > 0, ties.to(tl.float32) * each, 0.0)
    if top_p < 1.0:
        wanted = top_p.to(tl.float32) * total
        if mass >= wanted:
            threshold = _search(source, vocabulary, highest, temperature, wanted, False, BITS, BLOCK)
            mass = _sum(source, vocabulary, highest, temperature, threshold + 1, False, BLOCK)
            each = _probability(_value(threshold), highest, temperature)
            ties = vocabulary.to(tl.int64)
        needed = tl.ceil((wanted - mass) / tl.maximum(each, 1e-38))
        ties = tl.minimum(ties, tl.maximum(needed, 1.0).to(tl.int64))
        total = mass + ties.to(tl.float32) * each
    point = (_uniform(tl.load(seeds + row), tl.load(positions + row), ROUNDS) * total.to(tl.float64)).to(tl.float32)
    tl.store(out + row, _pick(source, vocabulary, highest, temperature, threshold, ties, point, BLOCK))


@triton.jit
def _highest(source, vocabulary, BLOCK: tl.constexpr):
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        found = tl.load(source + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, found)
    return tl.max(highest)


@triton.jit
def _key(value):
    """An unsigned 32-bit key in int64, ordered as the values are."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.uint32)
    return tl.where(bits >> 31 != 0, bits & 0x7FFFFFFF, bits ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _probability(value, highest, temperature):
    """Not normalized: the most likely token has 1."""
    return tl.exp((value - highest) / temperature)


@triton.jit
def _sum(source, vocabulary, highest, temperature, lowest_key, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits have this key or a higher one, or how much probability they have."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        found = tl.load(source + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        within = (_key(found) >= lowest_key) & (column < vocabulary)
        share = 1.0 if COUNT else _probability(found, highest, temperature)
        total += tl.where(within, share, 0.0)
    return tl.sum(total)


@triton.jit
def _search(
    source, vocabulary, highest, temperature, wanted, COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest key at or above which the count, or the probability, reaches `wanted`."""
    threshold = tl.zeros((), tl.int64)
    # In bfloat16 only the upper half of a key varies: the lower half is all zeros, or all ones for negative numbers.
    for index in range(BITS):
        candidate = threshold | (tl.full((), 1, tl.int64) << (31 - index))
        enough = _sum(source, vocabulary, highest, temperature, candidate, COUNT, BLOCK) >= wanted
        threshold = tl.where(enough, candidate, threshold)
    negative = threshold >> 31 == 0
    return tl.where(negative & (BITS == 16), threshold | 0xFFFF, threshold)


@triton.jit
def _pick(source, vocabulary, highest, temperature, threshold, ties, point, BLOCK: tl.constexpr):
    """The first kept token at which the probability up to and including it exceeds the point."""
    before = tl.zeros((), tl.float32)
    seen = tl.zeros((), tl.int64)
    picked = vocabulary.to(tl.int64)
    last = tl.zeros((), tl.int64)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        found = tl.load(source + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        key = _key(found)
        tied = ((key == threshold) & (column < vocabulary)).to(tl.int64)
        rank = seen + tl.cumsum(tied) - tied
        kept = ((key > threshold) | ((tied > 0) & (rank < ties))) & (column < vocabulary)
        share = tl.where(kept, _probability(found, highest, temperature), 0.0)
        reached = kept & (before + tl.cumsum(share) > point)
        picked = tl.minimum(picked, tl.min(tl.where(reached, column, vocabulary)).to(tl.int64))
        last = tl.maximum(last, tl.max(tl.where(share > 0, column, 0)).to(tl.int64))
        before += tl.sum(share)
        seen += tl.sum(tied)
    # A sum in another order may fall short of the point by a rounding error.
    return tl.where(picked < vocabulary, picked, last)


@triton.jit
def _uniform(seed, position, ROUNDS: tl.constexpr):
    """float64; the same function as kernels.sample.philox.uniform, with its constants."""
    a, b = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c, d = tl.zeros((), tl.uint32), tl.zeros((), tl.uint32)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    one, other = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in range(ROUNDS):
        upper, lower = tl.umulhi(c, other) ^ b ^ low, tl.umulhi(a, one) ^ d ^ high
        b, d = c * other, a * one
        a, c = upper, lower
        low, high = low + 0x9E3779B9, high + 0xBB67AE85
    return (a.to(tl.float64) + 0.5) / 4294967296.0


# A program does one part of one row, and keeps it in registers. Reads 2 bytes a logit in bfloat16.
@triton.jit
def _likeliest_of_parts(
    logits, values, token_ids, vocabulary, row_stride, parts, PART: tl.constexpr, DEPENDENT: tl.constexpr
):
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    found = tl.load(logits + row * row_stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    # NaN must not be compared with.
    found = tl.where(found == found, found, float("-inf"))
    highest = tl.max(found)
    tl.store(values + row * parts + part, highest)
    tl.store(token_ids + row * parts + part, tl.min(tl.where(found == highest, column, vocabulary)))


# A program does one row. Reads 8 bytes a part. The first rows' tokens are stored a second time, and all of them where
# an address says.
@triton.jit(do_not_specialize=["copied"])
def _likeliest(
    values, token_ids, out, copy, address, copied, vocabulary, parts, PARTS: tl.constexpr, ADDRESSED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    found = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    token_id = tl.load(token_ids + row * parts + part, mask=part < parts, other=vocabulary)
    likeliest = tl.min(tl.where(found == tl.max(found), token_id, vocabulary)).to(tl.int64)
    tl.store(out + row, likeliest)
    tl.store(copy + row, likeliest, mask=row < copied)
    if ADDRESSED:
        tl.store(tl.load(address).to(tl.pointer_type(tl.int64)) + row, likeliest)


def greedy(logits: torch.Tensor, copy: torch.Tensor | None = None, address: torch.Tensor | None = None) -> torch.Tensor:
    (rows, vocabulary), device = logits.shape, logits.device
    parts = cdiv(vocabulary, PART)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    values = torch.empty(rows, parts, dtype=torch.float32, device=device)
    token_ids = torch.empty(rows, parts, dtype=torch.int32, device=device)
    launch = dependent_launch(device)
    _likeliest_of_parts[(rows, parts)](
        logits, values, token_ids, vocabulary, logits.stride(0), parts, PART, num_warps=8, **launch
    )
    held = next_power_of_2(parts)
    copied = out if copy is None else copy
    _likeliest[(rows,)](
        values, token_ids, out, copied, address, len(copied), vocabulary, parts, held, address is not None,
        num_warps=1, **launch,
    )  # fmt: skip
    return out


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        bits = 16 if logits.dtype == torch.bfloat16 else 32
        _draw[(rows,)](
            logits, draws.temperature, draws.top_p, draws.min_p, draws.top_k, draws.seed, draws.position, out,
            vocabulary, logits.stride(0), bits, BLOCK, COLDEST, ROUNDS, num_warps=32,
            **dependent_launch(logits.device),
        )  # fmt: skip
    return out


# One program a piece of a row: reads 8 bytes a logit and writes 4. It runs only for rows that ask for penalties.
@triton.jit(do_not_specialize_on_alignment=PENALTY_POINTERS)
def _penalize(
    logits, counts, slots, repetitions, presences, frequencies, vocabulary, IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    logit = tl.load(logits + row * vocabulary + column, mask=inside)
    found = tl.load(counts + tl.load(slots + row) * vocabulary + column, mask=inside, other=0)
    repetition = tl.load(repetitions + row)
    repeated = tl.where(logit > 0, logit / repetition, logit * repetition)
    generated = (found & (IN_PROMPT - 1)).to(tl.float32)
    lowered = tl.load(frequencies + row) * generated + tl.where(generated > 0, tl.load(presences + row), 0.0)
    tl.store(logits + row * vocabulary + column, tl.where(found > 0, repeated, logit) - lowered, mask=inside)


def penalize(logits: torch.Tensor, counts: torch.Tensor, penalties: Penalties) -> None:
    rows, vocabulary = logits.shape
    _penalize[(rows, cdiv(vocabulary, PENALTY_BLOCK))](
        logits, counts, penalties.slot, penalties.repetition, penalties.presence, penalties.frequency,
        vocabulary, IN_PROMPT, PENALTY_BLOCK,
    )  # fmt: skip
