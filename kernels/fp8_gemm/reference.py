"""Block-scaled linear layer in plain torch: the definition."""

import torch

from kernels.act_quant.quantized import Quantized
from kernels.act_quant.reference import dequantize
from kernels.fp8_gemm.operands import BLOCK, BlockScaled


def fp8_gemm(x: Quantized, weight: BlockScaled) -> torch.Tensor:
    return (dequantize(x) @ dequantize_weight(weight).mT).bfloat16()


def dequantize_weight(weight: BlockScaled) -> torch.Tensor:
    outputs = weight.values.shape[-2]
    scales = weight.scales.repeat_interleave(BLOCK, dim=-2)[..., :outputs, :].repeat_interleave(BLOCK, dim=-1)
    return weight.values.float() * scales
