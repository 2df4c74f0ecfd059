"""Products with NVFP4 weights in plain torch: the definition."""

import torch

from kernels.nvfp4_gemm.weight import Nvfp4
from kernels.nvfp4_quant import dequantize_nvfp4


def nvfp4_grouped_gemm(x: torch.Tensor, weight: Nvfp4, ends: torch.Tensor) -> torch.Tensor:
    experts, outputs, _ = weight.codes.shape
    out = torch.empty(len(x), outputs, dtype=torch.float32, device=x.device)
    scales = weight.global_scales.repeat_interleave(weight.part_rows, dim=1)
    bounds = [0, *ends.tolist()]
    for expert in range(experts):
        rows = slice(bounds[expert], bounds[expert + 1])
        if rows.start < rows.stop:
            matrix = dequantize_nvfp4(weight.codes[expert], weight.scales[expert])
            out[rows] = x[rows].float() @ matrix.t() * scales[expert]
    return out.bfloat16()
