"""Keys and values of prompts in e4m3, as our FP8 attention on Hopper reads them: `cuda/fp8_quantize.cu`."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.mla_prefill.hopper_inputs import OWN, ROPE, VALUE
from kernels.mla_prefill.plan import PrefillPlan
from kernels.mla_prefill.tiles import BLOCK_KEYS as KEYS
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "fp8_quantize.cu"
Arguments = structure(SOURCE, "Arguments")
WIDTH, THREADS = OWN + ROPE, 2 * KEYS


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
        own=own.data_ptr(), shared=shared.data_ptr(), value=value.data_ptr(), blocks=plan.blocks.data_ptr(),
        keys=found.keys.data_ptr(), values=found.values.data_ptr(), scales=found.scales.data_ptr(),
        own_row=own.stride(0) * size, shared_row=shared.stride(0) * size, value_row=value.stride(0) * size,
        own_head=own.stride(1) * size, value_head=value.stride(1) * size, block_count=count,
    )  # fmt: skip
    load_kernel(SOURCE, "quantize_blocks", device.index or 0).launch((2 * heads, count, 1), THREADS, arguments)
    return found
