"""The choice of the highest scores in Triton: exact, by the bits of the scores (radix selection)."""

import torch
import triton
import triton.language as tl

from kernels.tile_sizes import next_power_of_2
from kernels.top_tokens.reference import NO_TOKEN

# Scores that a program reads at a time.
TILE = 2048


# Integers in the order of the scores. Both zeros are equal.
@triton.jit
def _keys(scores, place, inside):
    score = tl.load(scores + place, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 0, bits | 0x80000000, ~bits)


# A program chooses for one query. It finds the least chosen score from its highest byte to its lowest, with a histogram
# of those that agree in the bytes before, then writes the positions of what is chosen. Reads 4 bytes five times for
# each token seen (from the second time on mostly from the cache), writes 4 for each that is chosen.
@triton.jit(do_not_specialize=["width"])
def _select(scores, seen, out, width, count, TILE: tl.constexpr, PADDED: tl.constexpr, NO_TOKEN: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    scores += query * width
    out += query * count
    tokens = tl.load(seen + query)
    lane, bins = tl.arange(0, TILE), tl.arange(0, 256)
    # Chosen scores are at least `least`; of those that equal it as many as `wanted` are chosen.
    least, wanted = tl.zeros([], tl.uint32), tl.zeros([], tl.int32) + count
    if tokens > count:
        for byte in tl.static_range(4):
            shift = 24 - 8 * byte
            found = tl.zeros([256], tl.int32)
            for start in range(0, tokens, TILE):
                inside = start + lane < tokens
                keys = _keys(scores, start + lane, inside)
                if byte > 0:
                    inside = inside & (keys >> (shift + 8) == least >> (shift + 8))
                found += tl.histogram((keys >> shift & 0xFF).to(tl.int32), 256, mask=inside)
            # By bin, how many are in it and in those above it.
            above = tl.sum(found, axis=0) - tl.cumsum(found, axis=0) + found
            chosen = tl.max(tl.where(above >= wanted, bins, 0), axis=0)
            wanted -= tl.sum(tl.where(bins > chosen, found, 0), axis=0)
            least = least | (chosen.to(tl.uint32) << shift)
    written, equal_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, tokens, TILE):
        inside = start + lane < tokens
        keys = _keys(scores, start + lane, inside)
        equal = (inside & (keys == least)).to(tl.int32)
        early = equal_before + tl.cumsum(equal, axis=0) <= wanted
        taken = (inside & ((keys > least) | (equal > 0) & early)).to(tl.int32)
        place = written + tl.cumsum(taken, axis=0) - 1
        tl.store(out + place, start + lane, mask=taken > 0)
        written += tl.sum(taken, axis=0)
        equal_before += tl.sum(equal, axis=0)
    rest = tl.arange(0, PADDED)
    tl.store(out + rest, tl.zeros([PADDED], tl.int32) + NO_TOKEN, mask=(rest >= written) & (rest < count))


def top_tokens(scores: torch.Tensor, seen: torch.Tensor, count: int) -> torch.Tensor:
    queries, width = scores.shape
    out = torch.empty(queries, count, dtype=torch.int32, device=scores.device)
    if queries:
        _select[(queries,)](
            scores, seen, out, width, count, TILE, next_power_of_2(count), NO_TOKEN, num_warps=8,
        )  # fmt: skip
    return out
