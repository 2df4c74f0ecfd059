"""Grouped matrix products in plain torch: the definition."""

import torch
from torch.nn import functional

from kernels.act_quant.quantized import Quantized
from kernels.act_quant.reference import dequantize
from kernels.fp8_gemm.operands import BlockScaled
from kernels.fp8_gemm.reference import dequantize_weight
from kernels.moe_permute.layout import ContiguousLayout, Layout


def grouped_gemm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, weights.shape[1])
    return functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)


def all_groups_gemm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same without reading `ends` on the host: multiplies all rows by each group's matrix, keeps what applies."""
    group = torch.searchsorted(ends, torch.arange(len(x), dtype=ends.dtype, device=x.device), right=True)
    out = x.new_zeros(len(x), weights.shape[1])
    for index, weight in enumerate(weights):
        torch.where((group == index).unsqueeze(1), x @ weight.t(), out, out=out)
    return out


def grouped_fp8_gemm(x: Quantized, weight: BlockScaled, layout: Layout) -> torch.Tensor:
    activations, weights = dequantize(x), dequantize_weight(weight)
    out = activations.new_empty(*layout.shape, weights.shape[1])
    for expert, matrix in enumerate(weights):
        if isinstance(layout, ContiguousLayout):
            rows = layout.row_experts == expert
            out[rows] = activations[rows] @ matrix.t()
        else:
            count = int(layout.counts[expert])
            out[expert, :count] = activations[expert, :count] @ matrix.t()
    return out.bfloat16()
