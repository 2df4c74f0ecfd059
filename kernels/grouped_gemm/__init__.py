"""One matrix per group of rows: the experts' linear layers."""

from collections.abc import Sequence

import torch

from kernels.grouped_gemm import reference


def grouped_gemm(x: torch.Tensor, weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Rows of group g times weights[g] transposed; the first counts[0] rows are group 0, and so on.

    x: [rows, inputs] contiguous; weights: [groups, outputs, inputs] of the same dtype; counts: one per group, summing
    to rows. Returns [rows, outputs]; empty groups cost nothing, no rows give none. Backend: the reference.
    """
    assert x.shape[1] == weights.shape[2] and x.dtype == weights.dtype and x.is_contiguous()
    assert len(counts) == weights.shape[0] and sum(counts) == x.shape[0]
    return reference.grouped_gemm(x, weights, counts)
