"""Norm and a product of one row on Hopper, perhaps after residual addition, in one kernel: `cuda/multiplied.cu`.

Weights are in bfloat16 or in scaled FP8; the row is in bfloat16 either way.
"""

from pathlib import Path

import torch

from kernels.fp8_gemm.operands import BlockScaled
from kernels.linear import row_products
from kernels.moe_permute import ExpertOutputs
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "multiplied.cu"
Arguments = structure(SOURCE, "Arguments")
# As in the source: the most threads of a CTA, a thread's values, and the most rows of a sum. A warp has all places.
MOST_THREADS, VALUES, MOST_ROWS, MOST_PLACES = 256, 8, 9, 32
# The most weights of a layer for which this was measured.
MOST_WEIGHTS = 1 << 24


def takes(delta: torch.Tensor | ExpertOutputs, matrix: torch.Tensor | BlockScaled) -> bool:
    """Whether there is one row, not too wide, and few experts' rows. matrix: [outputs, width]."""
    rows = delta.rows if isinstance(delta, ExpertOutputs) else delta
    weights = matrix.values if isinstance(matrix, BlockScaled) else matrix
    if isinstance(delta, ExpertOutputs):
        summable = delta.shared is None and rows.dim() == 2 and delta.positions.shape[1] <= MOST_PLACES
    else:
        summable = True
    fits = len(rows) <= MOST_ROWS and rows.shape[-1] <= MOST_THREADS * VALUES and weights.numel() <= MOST_WEIGHTS
    readable = row_products.takes(delta.shape[0], rows.dtype, matrix) and rows.data_ptr() % 16 == 0
    return readable and fits and summable


def add_rms_norm_and_multiply(
    delta: torch.Tensor | ExpertOutputs,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    matrix: torch.Tensor | BlockScaled,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.norm.add_rms_norm_and_multiply`, for what it `takes`."""
    added = torch.empty_like(residual)
    return added, _launch(delta, residual, weight, epsilon, matrix, added)


def rms_norm_and_multiply(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, matrix: torch.Tensor | BlockScaled
) -> torch.Tensor:
    """As `kernels.norm.rms_norm_and_multiply`, for what it `takes`."""
    return _launch(x, None, weight, epsilon, matrix, None)


def _launch(
    delta: torch.Tensor | ExpertOutputs,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    matrix: torch.Tensor | BlockScaled,
    added: torch.Tensor | None,
) -> torch.Tensor:
    given, out = row_products.weight_argument(matrix)
    arguments = Arguments(
        weight=given, norm=weight.data_ptr(), residual=None if residual is None else residual.data_ptr(),
        added=None if added is None else added.data_ptr(), epsilon=epsilon,
    )  # fmt: skip
    if isinstance(delta, ExpertOutputs):
        arguments.delta, arguments.positions = delta.rows.data_ptr(), delta.positions.data_ptr()
        arguments.factors, arguments.rows = delta.weights.data_ptr(), len(delta.rows)
        arguments.places = delta.positions.shape[1]
    else:
        arguments.delta = delta.data_ptr()
    name = "multiplied_scaled" if isinstance(matrix, BlockScaled) else "multiplied"
    kernel = load_kernel(SOURCE, name, out.device.index or 0)
    kernel.launch(*row_products.launch_size(matrix), arguments, dependent=True)
    return out
