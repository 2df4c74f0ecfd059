"""Products with NVFP4 weights in Triton, for GPUs other than Hopper and for inputs that are no multiple of 128."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.nvfp4_gemm.weight import Nvfp4
from kernels.nvfp4_quant import GROUP
from kernels.tile_sizes import next_power_of_2


# e2m1 in halves, as whole numbers: 0, 1, 2, 3, 4, 6, 8, 12. code: [..] uint8, in the low four bits.
@triton.jit
def _halves(code):
    exponent, odd = (code >> 1) & 3, code & 1
    magnitude = tl.where(exponent == 0, odd, (2 + odd) << (tl.maximum(exponent, 1) - 1)).to(tl.float32)
    return tl.where(code >= 8, -magnitude, magnitude)


# A program computes a tile of one expert's outputs for some of its rows; the tile of weights is the product's first
# operand, which tensor cores take from registers. Reads outputs * inputs * 9/16 bytes for each expert that has a row.
@triton.jit
def _grouped(
    x, codes, scales, global_scales, ends, out, experts, outputs, inputs, part_rows, parts,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    every = tl.arange(0, EXPERTS)
    ends_of = tl.load(ends + every, mask=every < experts, other=0)
    starts_of = tl.load(ends + every - 1, mask=(every > 0) & (every < experts), other=0)
    tiles = tl.where(every < experts, (ends_of - starts_of + ROWS - 1) // ROWS, 0)
    tiles_to = tl.cumsum(tiles)
    expert = tl.sum((tiles_to <= tile).to(tl.int32))
    if expert >= experts:
        return
    own = every == expert
    first = tl.sum(tl.where(own, starts_of, 0)) + (tile - tl.sum(tl.where(own, tiles_to - tiles, 0))) * ROWS
    stop = tl.sum(tl.where(own, ends_of, 0))
    first_output = tl.program_id(0) * OUTPUTS
    row = first + tl.arange(0, ROWS)
    output = first_output + tl.arange(0, OUTPUTS)
    byte = tl.arange(0, INPUTS // 2)
    group = tl.arange(0, INPUTS // GROUP)
    place = expert.to(tl.int64) * outputs + output
    codes += place[:, None] * (inputs // 2) + byte[None, :]
    scales += place[:, None] * (inputs // GROUP) + group[None, :]
    # [INPUTS, ROWS]
    x += tl.minimum(row, stop - 1).to(tl.int64)[None, :] * inputs + tl.arange(0, INPUTS)[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for _ in range(inputs // INPUTS):
        packed = tl.load(codes)
        pairs = tl.join(_halves(packed & 15), _halves(packed >> 4)).reshape(OUTPUTS, INPUTS // GROUP, GROUP)
        halved = tl.load(scales).to(tl.float32) * 0.5
        weight = (pairs * halved[:, :, None]).reshape(OUTPUTS, INPUTS).to(tl.bfloat16)
        total = tl.dot(weight, tl.load(x), total)
        codes += INPUTS // 2
        scales += INPUTS // GROUP
        x += INPUTS
    total *= tl.load(global_scales + expert * parts + first_output // part_rows)
    out += row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(out, total.to(tl.bfloat16), mask=(row < stop)[None, :])


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def choose_tiling(rows: int) -> Tiling:
    """rows: how many an expert expects. A tile holds those of most experts if choices are even."""
    return Tiling(min(max(next_power_of_2(2 * rows), 16), 128), 64, 64, warps=4, stages=4)


def nvfp4_grouped_gemm(
    x: torch.Tensor, weight: Nvfp4, ends: torch.Tensor, tiling: Tiling | None = None
) -> torch.Tensor:
    """Same as `kernels.nvfp4_gemm.nvfp4_grouped_gemm`. tiling: None chooses by the expected rows of an expert."""
    (rows, inputs), (experts, outputs, _) = x.shape, weight.codes.shape
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    if not rows:
        return out
    tile = tiling or choose_tiling(-(-rows // experts))
    # Each expert may end with a tile that is not full.
    most_tiles = min(rows // tile.rows + experts, rows)
    _grouped[(outputs // tile.outputs, most_tiles)](
        x, weight.codes, weight.scales, weight.global_scales, ends, out, experts, outputs, inputs, weight.part_rows,
        weight.global_scales.shape[1], next_power_of_2(experts), tile.rows, tile.outputs, tile.inputs, GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
