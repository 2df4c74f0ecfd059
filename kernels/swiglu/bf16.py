"""SwiGLU with quantization of bfloat16 rows on Hopper: `cuda/bf16.cu`."""

from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized, cuda_macros, empty_quantized
from kernels.hopper import is_hopper
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "bf16.cu"
Arguments = structure(SOURCE, "Arguments")
# Threads of a CTA and values of a thread, as in the source.
THREADS, VALUES = 256, 8


def takes(gate_up: torch.Tensor) -> bool:
    """Whether the rows are bfloat16 and can be read 16 bytes at a time."""
    return is_hopper(gate_up.device) and gate_up.dtype == torch.bfloat16 and gate_up.data_ptr() % 16 == 0


def swiglu_quantize(gate_up: torch.Tensor, positions: torch.Tensor | None, powers: bool = False) -> Quantized:
    """As `kernels.swiglu.swiglu_quantize`, for rows that it `takes`."""
    *leading, rows, doubled = gate_up.shape
    width, device = doubled // 2, gate_up.device
    out = empty_quantized(*leading, rows, width, device=device, powers=powers)
    used = gate_up.shape[:-1].numel() if positions is None else positions.numel()
    if not used:
        return out
    arguments = Arguments(
        gate_up=gate_up.data_ptr(), positions=None if positions is None else positions.data_ptr(),
        values=out.values.data_ptr(), scales=out.scales.data_ptr(), capacity=rows,
        scale_stride=out.scales.stride(-1), width=width,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, "swiglu_quantize", device.index or 0, cuda_macros(powers))
    kernel.launch((used, -(-width // (THREADS * VALUES)), 1), THREADS, arguments, dependent=True)
    return out
