"""SwiGLU in plain torch: the definition."""

import torch
from torch.nn import functional

from kernels.act_quant.quantized import Quantized
from kernels.act_quant.reference import quantize


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def swiglu_quantize(gate_up: torch.Tensor, powers: bool = False) -> Quantized:
    # Quantizes the float32 values: one rounding less.
    return quantize(swiglu(gate_up.float()), powers=powers)
