"""One matrix per group of rows: the experts' linear layers."""

import torch

from kernels.grouped_gemm import reference


def grouped_gemm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of group g times weights[g] transposed; group g's rows are ends[g - 1] to ends[g], the first one's from 0.

    x: [rows, inputs] contiguous; weights: [groups, outputs, inputs] of the same dtype; ends: [groups] int32, ascending,
    the last one the number of rows. Returns [rows, outputs]; empty groups cost nothing, no rows give none. Backend: the
    reference.
    """
    assert x.shape[1] == weights.shape[2] and x.dtype == weights.dtype and x.is_contiguous()
    assert ends.shape == weights.shape[:1] and ends.dtype == torch.int32
    return reference.grouped_gemm(x, weights, ends)
