"""Grouped matrix product in plain torch, the definition."""

import torch
from torch.nn import functional


def grouped_gemm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, weights.shape[1])
    return functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
