"""Norm and a product of one row on Hopper, in Triton, perhaps after residual addition: one kernel in place of two."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.hopper import is_hopper
from kernels.moe_permute import ExpertOutputs
from kernels.tile_sizes import cdiv, next_power_of_2

# Weights of a program, which hold 64 registers of a thread, and its warps: each program adds and normalizes the row for
# itself, so they are few and large.
TILE, WARPS = 1 << 15, 8
# The most rows of a sum, the widest rows and the most weights for which this was measured.
MOST_ROWS, MOST_WIDTH, MOST_WEIGHTS = 16, 4096, 1 << 24


# A program holds some outputs' weights in registers before it waits, then normalizes the whole row: that takes less
# time than to meet. So the sums go to another place than they come from. ROWS: of a sum, 0 for one row that is none.
# All of them are loaded at once, and which of them a choice has is found meanwhile. Reads 2 bytes a weight once, and
# the rows once a program from the second-level cache.
@triton.jit
def _add_norm_and_multiply(
    delta, positions, factors, residual, norm, matrix, added, out, outputs, epsilon, ROWS: tl.constexpr,
    PLACES: tl.constexpr, PLACES_TILE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_TILE: tl.constexpr,
    OUTPUTS_TILE: tl.constexpr, ADDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    output, column = tl.program_id(0) * OUTPUTS_TILE + tl.arange(0, OUTPUTS_TILE), tl.arange(0, WIDTH_TILE)
    inside, there = column < WIDTH, output < outputs
    own = matrix + output[:, None].to(tl.int64) * WIDTH + column[None, :]
    held = tl.load(own, mask=there[:, None] & inside[None, :], other=0.0)
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_earlier(DEPENDENT)
    if ADDS:
        before = tl.load(residual + column, mask=inside, other=0.0)
    if ROWS == 0:
        found = tl.load(delta + column, mask=inside, other=0.0)
    else:
        place = tl.arange(0, PLACES_TILE)
        chosen = tl.load(positions + place, mask=place < PLACES, other=-1)
        factor = tl.load(factors + place, mask=place < PLACES, other=0.0)
        total = tl.zeros([WIDTH_TILE], dtype=tl.float32)
        for row in tl.static_range(ROWS):
            values = tl.load(delta + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            # A row that no choice has was not written.
            used = tl.sum((chosen == row).to(tl.int32), axis=0) > 0
            total += tl.sum(tl.where(chosen == row, factor, 0.0), axis=0) * tl.where(used, values, 0.0)
        found = total.to(delta.dtype.element_ty)
    if ADDS:
        found = (found.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        if tl.program_id(0) == 0:
            tl.store(added + column, found, mask=inside)
    whole = found.to(tl.float32)
    scale = tl.rsqrt(tl.sum(whole * whole, axis=0) / WIDTH + epsilon)
    # Rounds twice, as the reference does: after normalizing and after multiplying.
    normalized = ((whole * scale).to(found.dtype).to(tl.float32) * weight).to(found.dtype)
    total = tl.sum(held.to(tl.float32) * normalized.to(tl.float32)[None, :], axis=1)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=there)


def takes(delta: torch.Tensor | ExpertOutputs, matrix: torch.Tensor) -> bool:
    """Whether there is one row, not too wide, and few experts' rows. matrix: [outputs, width]."""
    rows = delta.rows if isinstance(delta, ExpertOutputs) else delta
    summable = not isinstance(delta, ExpertOutputs) or (delta.shared is None and rows.dim() == 2)
    fits = len(rows) <= MOST_ROWS and rows.shape[-1] <= MOST_WIDTH and matrix.numel() <= MOST_WEIGHTS
    bf16 = rows.dtype == matrix.dtype == torch.bfloat16
    return is_hopper() and delta.shape[0] == 1 and bf16 and fits and summable


def add_rms_norm_and_multiply(
    delta: torch.Tensor | ExpertOutputs,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    matrix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.norm.add_rms_norm_and_multiply`, for what it `takes`."""
    added = torch.empty_like(residual)
    return added, _launch(delta, residual, weight, epsilon, matrix, added)


def rms_norm_and_multiply(x: torch.Tensor, weight: torch.Tensor, epsilon: float, matrix: torch.Tensor) -> torch.Tensor:
    """As `kernels.norm.rms_norm_and_multiply`, for what it `takes`."""
    return _launch(x, None, weight, epsilon, matrix, None)


def _launch(
    delta: torch.Tensor | ExpertOutputs,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    matrix: torch.Tensor,
    added: torch.Tensor | None,
) -> torch.Tensor:
    outputs, width = matrix.shape
    out = matrix.new_empty(1, outputs)
    padded = next_power_of_2(width)
    tile, rows, positions, factors, row_count, places = TILE // padded, delta, None, None, 0, 0
    if isinstance(delta, ExpertOutputs):
        rows, positions, factors = delta.rows, delta.positions, delta.weights
        row_count, places = len(rows), positions.shape[1]
    launch(_add_norm_and_multiply, (cdiv(outputs, tile),), matrix.device,
        rows, positions, factors, residual, weight, matrix, added, out, outputs, epsilon, row_count, places,
        next_power_of_2(places), width, padded, tile, residual is not None, num_warps=WARPS,
    )  # fmt: skip
    return out
