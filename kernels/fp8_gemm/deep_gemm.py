"""deep_gemm's block-scaled linear layer."""

from functools import cache
from types import ModuleType

import torch

from kernels.act_quant import quantize
from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm import reference
from kernels.fp8_gemm.operands import BlockScaled, block_scaled
from kernels.hopper import is_hopper
from kernels.vendor import find_package, is_right

PACKAGE = "deep_gemm"
# What our adapters call, in this folder and in `grouped_gemm`.
FUNCTIONS = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "fp8_m_grouped_gemm_nt_masked")
# The smallest weight worth its compilations. The package compiles a kernel for some three seconds for each tiling, and
# the tiling depends on the number of rows. A smaller weight never earns that time back.
FEWEST_BYTES = 1 << 20
FEW_ROWS, MANY_ROWS = 32, 512
# The trial's rows, and the largest relative error that rounding to bfloat16 explains.
TRIAL_ROWS, TRIAL_ERROR = 70, 0.02


def available() -> bool:
    """Whether there is a Hopper GPU, and a package that is right on it. The first call tries that: it compiles."""
    return package() is not None


@cache
def package() -> ModuleType | None:
    """None if it is not `available`."""
    return find_working(torch.device("cuda")) if is_hopper() else None


def find_working(device: torch.device) -> ModuleType | None:
    """None if there is no package, or if it is wrong there."""
    found = find_package(PACKAGE, FUNCTIONS)
    return found if found is not None and is_right(PACKAGE, lambda: _error(found, device), TRIAL_ERROR) else None


def is_worth_compiling(outputs: int, inputs: int) -> bool:
    """Whether a weight of these dimensions is worth the package's compilations."""
    return outputs * inputs >= FEWEST_BYTES


def is_faster(rows: int, outputs: int, inputs: int, *, fills_chip: bool) -> bool:
    """Whether it is faster than our kernels, as measured on an H200.

    fills_chip: whether `many_rows` takes the product.
    """
    return is_worth_compiling(outputs, inputs) and rows > (MANY_ROWS if fills_chip else FEW_ROWS)


def fp8_gemm(x: Quantized, weight: BlockScaled) -> torch.Tensor:
    found = package()
    assert found is not None
    return _multiply(found, x, weight)


def _multiply(found: ModuleType, x: Quantized, weight: BlockScaled) -> torch.Tensor:
    rows, outputs = x.values.shape[0], weight.values.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.values.device)
    if rows:
        found.fp8_gemm_nt((x.values, x.scales), (weight.values, weight.scales), out)
    return out


def _error(found: ModuleType, device: torch.device) -> float:
    """The relative error of a product over two groups of inputs by two blocks of outputs."""
    generator = torch.Generator().manual_seed(0)
    x = quantize(torch.randn(TRIAL_ROWS, 256, generator=generator).to(device))
    values = torch.randn(256, 256, generator=generator).to(device, torch.float8_e4m3fn)
    weight = block_scaled(values, torch.rand(2, 2, generator=generator).to(device))
    expected = reference.fp8_gemm(x, weight).float()
    return float((_multiply(found, x, weight).float() - expected).norm() / expected.norm())
