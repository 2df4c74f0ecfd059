"""Which lines hold enough of a head's mass, in Triton: what `selection.choose` chooses."""

import torch
import triton
import triton.language as tl

from kernels.sparse_prefill.line_masses import BLOCK_KEYS, LineMasses
from kernels.tile_sizes import next_power_of_2

# Blocks that a program has room for, so that the kernel is not compiled again for other prompts: 262,144 tokens.
PADDED = 4096


@triton.jit
def _weights(columns, slashes, line, blocks):
    """What columns and slashes weigh. Those that are always kept are above any sum of weights."""
    known = (line >= 0) & (line < blocks)
    column = tl.load(columns + line, mask=known, other=0.0)
    slash = tl.load(slashes + line, mask=known, other=0.0)
    always = float("inf")
    return tl.where(line == 0, always, column), tl.where((line == 0) | (line == 1), always, slash)


# A program chooses the lines of one head. It finds the bound bit by bit: weights are not negative, and compare as their
# bits do. Parts stay in registers meanwhile. Reads 20 bytes a block, writes 2.
@triton.jit(do_not_specialize=["blocks", "middle", "wanted"])
def _choose(
    columns, slashes, parts, kept_columns, kept_slashes, blocks, middle, wanted,
    UNITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    columns += head * blocks
    slashes += head * blocks
    block, neighbour = tl.arange(0, PADDED)[:, None], tl.arange(0, 4)[None, :]
    inside = (block < blocks) & (neighbour < 3)
    column, _ = _weights(columns, slashes, block, blocks)
    # A line that does not exist has no mass, so it does not matter what it weighs.
    _, slash = _weights(columns, slashes, middle - block + neighbour - 1, blocks)
    mass = tl.load(parts + (head * blocks + block) * 3 + neighbour, mask=inside, other=0.0)
    mass = tl.floor(mass * UNITS + 0.5).to(tl.int32)
    weight = tl.maximum(column, slash).to(tl.int32, bitcast=True)
    bound = wanted * 0
    for bit in range(31):
        higher = bound | (1 << (30 - bit))
        bound = tl.where(tl.sum(tl.where(weight >= higher, mass, 0)) >= wanted, higher, bound)
    line = tl.arange(0, PADDED)
    column, slash = _weights(columns, slashes, line, blocks)
    # Nothing weighs more than what is always kept.
    bound = tl.minimum(bound, 0x7F800000)
    known = line < blocks
    tl.store(kept_columns + head * blocks + line, column.to(tl.int32, bitcast=True) >= bound, mask=known)
    tl.store(kept_slashes + head * blocks + line, slash.to(tl.int32, bitcast=True) >= bound, mask=known)


def choose(masses: LineMasses, first: int, wanted: int, units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and slashes, as `Selection` has them. wanted: the mass, in `units`."""
    heads, blocks = masses.columns.shape
    columns, slashes = torch.empty(2, heads, blocks, dtype=torch.bool, device=masses.columns.device)
    _choose[(heads,)](
        masses.columns, masses.slashes, masses.parts, columns, slashes, blocks, first // BLOCK_KEYS, wanted,
        units, max(next_power_of_2(blocks), PADDED), num_warps=16,
    )  # fmt: skip
    return columns, slashes
