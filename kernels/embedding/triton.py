"""Embeddings in Triton: one launch that starts early, in place of two that do not."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.tile_sizes import cdiv

# Values of a program, and its warps: 16 bytes of bfloat16 a thread.
TILE, WARPS = 1024, 4


# A program copies a part of one token's row, and clears the same part of the residual's. Reads 2 bytes a value and
# writes 4.
@triton.jit(do_not_specialize=["first", "vocabulary", "tokens", "residual_rows"])
def _embed(
    token_ids, table, out, residual, first, vocabulary, tokens, residual_rows, width, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    wait_for_earlier(DEPENDENT)
    if row < tokens:
        place = tl.load(token_ids + row) - first
        known = column < tl.where((place >= 0) & (place < vocabulary), width, 0)
        found = tl.load(table + place * width + column, mask=known, other=0.0)
        tl.store(out + row * width + column, found, mask=inside)
    if row < residual_rows:
        tl.store(residual + row * width + column, tl.zeros([TILE], residual.dtype.element_ty), mask=inside)


def embed(
    token_ids: torch.Tensor, table: torch.Tensor, first: int, residual_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, (vocabulary, width) = len(token_ids), table.shape
    out, residual = table.new_empty(tokens, width), table.new_empty(residual_rows, width)
    rows = max(tokens, residual_rows)
    if rows:
        launch(_embed, (rows, cdiv(width, TILE)), table.device,
            token_ids, table, out, residual, first, vocabulary, tokens, residual_rows, width, TILE, num_warps=WARPS,
        )  # fmt: skip
    return out, residual
