"""How many drafts are right, once a token is drawn after each of them, and what their row yields."""

import torch

from kernels.draft_check import reference


def count_accepted(drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """How many drafts of each row equal the tokens drawn in their places, up to the first that does not: [rows] int64.

    drawn: [rows, 1 + n] int64; drafts: [rows, n] int64, which no token equals where there are fewer.
    """
    assert drawn.shape == (drafts.shape[0], drafts.shape[1] + 1) and drawn.dtype == drafts.dtype == torch.int64
    if drawn.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.draft_check import triton

        return triton.count_accepted(drawn, drafts)
    return reference.count_accepted(drawn, drafts)


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
    """Write the last token that each line yields to `last_drawn`, and to `missing` how many tokens fewer it yields than
    it could, for the rows that follow.

    accepted: [lines] int64; drawn: [lines, 1 + n] int64; first: [lines] int64, the index of each line's first drawn
    token among those of the step; starts: [lines] int32, its position; drafts: [lines] int32, how many there were;
    rows: [lines] int64, the line's index in the two that are written, [most rows] int64 and int32, by default its own.
    Contiguous. Returns index and position of the last token: [lines] int64 and [lines] int32.
    """
    assert accepted.dtype == drawn.dtype == first.dtype == last_drawn.dtype == torch.int64 and drawn.is_contiguous()
    assert starts.dtype == drafts.dtype == missing.dtype == torch.int32
    assert accepted.shape == first.shape == starts.shape == drafts.shape == drawn.shape[:1]
    given = accepted, drawn, first, starts, drafts, rows, last_drawn, missing
    if drawn.is_cuda:
        from kernels.draft_check import triton

        return triton.settle(*given)
    return reference.settle(*given)
