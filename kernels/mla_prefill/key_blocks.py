"""Keys and values of prompts in e4m3, as our FP8 attention on Hopper reads them: `cuda/fp8_quantize.cu`."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.mla_prefill.hopper_inputs import OWN, ROPE, VALUE
from kernels.mla_prefill.plan import PrefillPlan
from kernels.mla_prefill.tiles import BLOCK_KEYS as KEYS
from kernels.nvrtc import load_kernel

SOURCE = Path(__file__).parent / "cuda" / "fp8_quantize.cu"
WIDTH, THREADS = OWN + ROPE, 2 * KEYS


class Arguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        ("own", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("own_row", ctypes.c_longlong),
        ("shared_row", ctypes.c_longlong),
        ("value_row", ctypes.c_longlong),
        ("own_head", ctypes.c_int),
        ("value_head", ctypes.c_int),
        ("block_count", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """Keys and values in e4m3, block by block as the kernel reads them.

    keys: [heads, blocks, KEYS * 192] and values: [heads, blocks, KEYS * 128] uint8; scales: [heads, blocks, 4] float32:
    the keys' scale, the logarithm to base 2 of the values' scale, its inverse, and nothing.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor


def quantize_blocks(own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor, plan: PrefillPlan) -> KeyBlocks:
    assert plan.blocks is not None
    heads, count, device = own.shape[1], plan.blocks.shape[0], own.device
    found = KeyBlocks(
        torch.empty(heads, count, KEYS * WIDTH, dtype=torch.uint8, device=device),
        torch.empty(heads, count, KEYS * VALUE, dtype=torch.uint8, device=device),
        torch.empty(heads, count, 4, dtype=torch.float32, device=device),
    )
    size = own.element_size()
    arguments = Arguments(
        own.data_ptr(), shared.data_ptr(), value.data_ptr(), plan.blocks.data_ptr(),
        found.keys.data_ptr(), found.values.data_ptr(), found.scales.data_ptr(),
        own.stride(0) * size, shared.stride(0) * size, value.stride(0) * size,
        own.stride(1) * size, value.stride(1) * size, count,
    )  # fmt: skip
    load_kernel(SOURCE, "quantize_blocks", device.index or 0).launch((2 * heads, count, 1), THREADS, arguments)
    return found
