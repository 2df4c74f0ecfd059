"""Checks of drafts in Triton: one launch each, in place of some five and ten.

Neither is compiled again for other numbers of rows or drafts, nor for tensors that begin elsewhere.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier

COUNT_SIZES = ["drawn_row", "drawn_token", "drafts_row", "drafts_token", "count"]
SETTLE_POINTERS = ["accepted", "drawn", "first", "starts", "drafts", "rows", "last_drawn", "missing"]


# A program does one row: some 16 bytes a draft.
@triton.jit(do_not_specialize=COUNT_SIZES, do_not_specialize_on_alignment=["drawn", "drafts"])
def _count_accepted(
    drawn, drafts, out, drawn_row, drawn_token, drafts_row, drafts_token, count, DEPENDENT: tl.constexpr
):
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    accepted = tl.zeros((), tl.int64)
    right = tl.full((), 1, tl.int64)
    for place in range(count):
        one = tl.load(drawn + row * drawn_row + place * drawn_token)
        right = right * (one == tl.load(drafts + row * drafts_row + place * drafts_token)).to(tl.int64)
        accepted += right
    tl.store(out + row, accepted)


# A program does one line: some 60 bytes.
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=SETTLE_POINTERS)
def _settle(
    accepted, drawn, first, starts, drafts, rows, last_drawn, missing, last, positions, width,
    OWN_ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    line = tl.program_id(0).to(tl.int64)
    row = line if OWN_ROWS else tl.load(rows + line)
    count = tl.load(accepted + line)
    tl.store(last_drawn + row, tl.load(drawn + line * width + count))
    tl.store(missing + row, tl.load(drafts + line) - count.to(tl.int32))
    tl.store(last + line, tl.load(first + line) + count)
    tl.store(positions + line, tl.load(starts + line) + count.to(tl.int32))


def count_accepted(drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    rows, count = drafts.shape
    out = torch.empty(rows, dtype=torch.int64, device=drawn.device)
    if rows:
        launch(
            _count_accepted, (rows,), drawn.device, drawn, drafts, out, *drawn.stride(), *drafts.stride(), count,
            num_warps=1,
        )  # fmt: skip
    return out


def settle(
    accepted: torch.Tensor,
    drawn: torch.Tensor,
    first: torch.Tensor,
    starts: torch.Tensor,
    drafts: torch.Tensor,
    rows: torch.Tensor | None,
    last_drawn: torch.Tensor,
    missing: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    lines, width = drawn.shape
    last, positions = torch.empty_like(first), torch.empty_like(starts)
    if lines:
        launch(_settle, (lines,), drawn.device,
            accepted, drawn, first, starts, drafts, rows, last_drawn, missing, last, positions, width, rows is None,
            num_warps=1,
        )  # fmt: skip
    return last, positions
