"""Residual addition, norm and quantization on Hopper, a cluster of CTAs a row: `cuda/clusters.cu`."""

from pathlib import Path

import torch

from kernels.act_quant.quantized import GROUP, Quantized, cuda_macros
from kernels.hopper import is_hopper
from kernels.moe_permute import ExpertOutputs
from kernels.moe_permute.experts import expert_sum
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "clusters.cu"
Arguments = structure(SOURCE, "Arguments")
# As many rows as a chunk of experts' outputs has. Plain tensors of more than 256 rows take as long in the Triton
# kernel.
MOST_ROWS = 8192
# Supported numbers of weighted rows of a sum, of chosen and shared experts. 0 means one row, which is no sum.
CHOICES = (0, 5, 6, 7, 8, 9)
# CTAs of a row, and of each of many rows, which need no more to fill the chip; values of a thread, and the most threads
# of a CTA.
CTAS, FEW_CTAS, VALUES, MOST_THREADS = 4, 2, 8, 256
# From this many rows on there are many.
MANY_ROWS = 256


def takes(delta: torch.Tensor | ExpertOutputs, residual: torch.Tensor) -> bool:
    """Whether the kernel supports these tensors."""
    rows, width = residual.shape
    threads = width // (CTAS * VALUES)
    fits = rows <= MOST_ROWS and width % (CTAS * 2 * GROUP) == 0 and threads <= MOST_THREADS
    return is_hopper() and residual.dtype == torch.bfloat16 and fits and _is_readable(delta)


def add_rms_norm(
    delta: torch.Tensor | ExpertOutputs,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    plain: torch.Tensor | None,
    quantized: Quantized | None,
) -> None:
    """For tensors that it `takes`. Fills the forms that are given with the normalized rows."""
    (rows, width), device = residual.shape, residual.device
    if not rows:
        return
    arguments = Arguments(residual=residual.data_ptr(), weight=weight.data_ptr(), width=width, epsilon=epsilon)
    arguments.plain = None if plain is None else plain.data_ptr()
    if isinstance(delta, ExpertOutputs):
        arguments.experts = expert_sum(delta)
    else:
        arguments.x, arguments.row_stride = delta.data_ptr(), delta.stride(0)
    if quantized is not None:
        arguments.values, arguments.scales = quantized.values.data_ptr(), quantized.scales.data_ptr()
        arguments.scale_stride = quantized.scales.stride(1)
    macros = cuda_macros(quantized is not None and quantized.powers)
    kernel = load_kernel(SOURCE, f"norm_{_choices(delta)}", device.index or 0, macros)
    ctas = _ctas(rows, width)
    kernel.launch((rows * ctas, 1, 1), width // (ctas * VALUES), arguments, cluster=ctas, dependent=True)


def _ctas(rows: int, width: int) -> int:
    return FEW_CTAS if rows >= MANY_ROWS and width <= FEW_CTAS * VALUES * MOST_THREADS else CTAS


def _choices(delta: torch.Tensor | ExpertOutputs) -> int:
    return delta.positions.shape[1] if isinstance(delta, ExpertOutputs) else 0


def _is_readable(delta: torch.Tensor | ExpertOutputs) -> bool:
    """Whether a sum has a supported number of rows, or rows can be read 16 bytes at a time."""
    if isinstance(delta, ExpertOutputs):
        return _choices(delta) in CHOICES
    return delta.stride(0) % VALUES == 0 and delta.data_ptr() % 16 == 0
