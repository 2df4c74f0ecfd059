"""Grouped matrix product in plain torch, the definition."""

from collections.abc import Sequence

import torch


def grouped_gemm(x: torch.Tensor, weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weights.shape[1])
    start = 0
    for group, count in enumerate(counts):
        if count:
            torch.mm(x[start : start + count], weights[group].t(), out=out[start : start + count])
            start += count
    return out
