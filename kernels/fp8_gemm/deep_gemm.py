"""deep_gemm's block-scaled linear layer."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.weight import BlockScaled
from kernels.hopper import is_hopper

PACKAGE = "deep_gemm"
# The smallest weight worth its compilations. The package compiles a kernel for some three seconds for each tiling, and
# the tiling depends on the number of rows. A smaller weight never earns that time back.
FEWEST_BYTES = 1 << 20
FEW_ROWS, MANY_ROWS = 32, 512


@cache
def available() -> bool:
    """Whether there is a Hopper GPU, and the package."""
    return is_hopper() and find_spec(PACKAGE) is not None


def is_worth_compiling(outputs: int, inputs: int) -> bool:
    """Whether a weight of these dimensions is worth the package's compilations."""
    return outputs * inputs >= FEWEST_BYTES


def is_faster(rows: int, outputs: int, inputs: int, *, fills_chip: bool) -> bool:
    """Whether it is faster than our kernels, as measured on an H200.

    fills_chip: whether `many_rows` takes the product.
    """
    return is_worth_compiling(outputs, inputs) and rows > (MANY_ROWS if fills_chip else FEW_ROWS)


def fp8_gemm(x: Quantized, weight: BlockScaled) -> torch.Tensor:
    rows, outputs = x.values.shape[0], weight.values.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.values.device)
    if rows:
        import_module(PACKAGE).fp8_gemm_nt((x.values, x.scales), (weight.values, weight.scales), out)
    return out
