"""A linear layer for one row on Hopper: `cuda/row_products.cu`. It reads its weight while the kernels before it run.

Weights are in bfloat16 or in scaled FP8; the row is in bfloat16 either way.
"""

import ctypes
from pathlib import Path

import torch

from kernels.fp8_gemm.operands import BLOCK, BlockScaled
from kernels.hopper import is_hopper
from kernels.nvrtc import load_kernel
from kernels.structures import structure
from kernels.tile_sizes import cdiv

SOURCE = Path(__file__).parent / "cuda" / "row_products.cu"
Weight = structure(SOURCE.parent / "row_products.cuh", "Weight")
Arguments = structure(SOURCE, "Arguments")
# As in the source: outputs of a CTA, inputs of a warp, the most threads of a CTA; and what inputs are a multiple of.
OUTPUTS, INPUTS, MOST_THREADS, UNIT = 16, 256, 640, 32
# The most weights of a layer for which this was measured, in bfloat16 and in FP8.
MOST_WEIGHTS, MOST_SCALED = 1 << 26, 12 << 20


def takes(rows: int, dtype: torch.dtype, weight: torch.Tensor | BlockScaled) -> bool:
    """Whether this is one bfloat16 row, and a CTA's threads hold whole rows of the weight: [outputs, inputs]."""
    values = weight.values if isinstance(weight, BlockScaled) else weight
    inputs, most = values.shape[1], MOST_SCALED if isinstance(weight, BlockScaled) else MOST_WEIGHTS
    alike = isinstance(weight, BlockScaled) or weight.dtype == torch.bfloat16
    fits = inputs % UNIT == 0 and inputs <= MOST_THREADS // 32 * INPUTS and values.numel() <= most
    return is_hopper() and rows == 1 and dtype == torch.bfloat16 and alike and fits and values.data_ptr() % 16 == 0


def multiply(x: torch.Tensor, weight: torch.Tensor | BlockScaled) -> torch.Tensor:
    """x times the transposed weight, for what it `takes`. x: [1, inputs], at a multiple of 16 bytes."""
    given, out = weight_argument(weight)
    kernel = load_kernel(
        SOURCE, "multiply_row_scaled" if isinstance(weight, BlockScaled) else "multiply_row", x.device.index or 0
    )
    assert x.data_ptr() % 16 == 0
    kernel.launch(*launch_size(weight), Arguments(weight=given, x=x.data_ptr()), dependent=True)
    return out


def weight_argument(weight: torch.Tensor | BlockScaled) -> tuple[ctypes.Structure, torch.Tensor]:
    """`Weight` of the source, and where it has the product written: [1, outputs]."""
    values, scales = (weight.values, weight.scales) if isinstance(weight, BlockScaled) else (weight, None)
    outputs, width = values.shape
    assert scales is None or width % BLOCK == 0
    out = torch.empty(1, outputs, dtype=torch.bfloat16, device=values.device)
    given = Weight(
        values=values.data_ptr(), scales=None if scales is None else scales.data_ptr(), out=out.data_ptr(), width=width,
        outputs=outputs,
    )  # fmt: skip
    return given, out


def launch_size(weight: torch.Tensor | BlockScaled) -> tuple[tuple[int, int, int], int]:
    """The grid, and threads of a CTA."""
    outputs, inputs = (weight.values if isinstance(weight, BlockScaled) else weight).shape
    return (cdiv(outputs, OUTPUTS), 1, 1), cdiv(inputs, INPUTS) * 32
