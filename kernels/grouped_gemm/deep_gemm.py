"""deep_gemm's grouped block-scaled linear layers."""

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.deep_gemm import available, is_worth_compiling, package
from kernels.fp8_gemm.operands import BlockScaled
from kernels.moe_permute.layout import ContiguousLayout, Layout

__all__ = ["available", "grouped_fp8_gemm", "is_faster"]

# Up to this many expected rows an expert, our kernel is faster in a masked layout, as measured on an H200.
FEW_ROWS = 64


def is_faster(layout: Layout, weight: BlockScaled) -> bool:
    """Whether it is faster than our kernel, as measured on an H200."""
    many_rows = isinstance(layout, ContiguousLayout) or layout.expected_rows > FEW_ROWS
    return many_rows and is_worth_compiling(*weight.values.shape[1:])


def grouped_fp8_gemm(x: Quantized, weight: BlockScaled, layout: Layout) -> torch.Tensor:
    found = package()
    assert found is not None
    out = torch.empty(*layout.shape, weight.values.shape[1], dtype=torch.bfloat16, device=x.values.device)
    left, right = (x.values, x.scales), (weight.values, weight.scales)
    if not layout.positions.numel():
        return out
    if isinstance(layout, ContiguousLayout):
        found.m_grouped_fp8_gemm_nt_contiguous(left, right, out, layout.row_experts)
    else:
        # It stores whole tiles of up to 128 rows, which must not reach into the next expert's rows.
        assert layout.capacity % 128 == 0 or layout.capacity == 64
        found.fp8_m_grouped_gemm_nt_masked(left, right, out, layout.counts, layout.expected_rows)
    return out
