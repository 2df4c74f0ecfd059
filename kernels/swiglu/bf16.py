"""SwiGLU with quantization of bfloat16 rows on Hopper: `cuda/bf16.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized, empty_quantized
from kernels.hopper import is_hopper
from kernels.nvrtc import load_kernel

SOURCE = Path(__file__).parent / "cuda" / "bf16.cu"
# Threads of a CTA and values of a thread, as in the source.
THREADS, VALUES = 256, 8


class Arguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("capacity", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
        ("width", ctypes.c_int),
    )


def takes(gate_up: torch.Tensor) -> bool:
    """Whether the rows are bfloat16 and can be read 16 bytes at a time."""
    return is_hopper(gate_up.device) and gate_up.dtype == torch.bfloat16 and gate_up.data_ptr() % 16 == 0


def swiglu_quantize(gate_up: torch.Tensor, positions: torch.Tensor | None) -> Quantized:
    """As `kernels.swiglu.swiglu_quantize`, for rows that it `takes`."""
    *leading, rows, doubled = gate_up.shape
    width, device = doubled // 2, gate_up.device
    out = empty_quantized(*leading, rows, width, device=device)
    used = gate_up.shape[:-1].numel() if positions is None else positions.numel()
    if not used:
        return out
    arguments = Arguments(
        gate_up.data_ptr(), None if positions is None else positions.data_ptr(), out.values.data_ptr(),
        out.scales.data_ptr(), rows, out.scales.stride(-1), width,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, "swiglu_quantize", device.index or 0)
    kernel.launch((used, -(-width // (THREADS * VALUES)), 1), THREADS, arguments, dependent=True)
    return out
