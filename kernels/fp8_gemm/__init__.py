"""FP8 linear layers: activations scaled by token and 128 channels, weights by blocks of 128x128.

DeepSeek-V3 (2024), section 3.3: each 128 products along the inputs are summed in the tensor cores, then scaled and
summed in float32. One row may stay in bfloat16: quantizing it takes longer than it saves.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm import deep_gemm, reference
from kernels.fp8_gemm.operands import BLOCK, BlockScaled, Workspace, block_scaled, make_workspace

__all__ = ["BLOCK", "BlockScaled", "Workspace", "block_scaled", "fp8_gemm", "make_workspace", "takes_unquantized"]


def takes_unquantized(rows: int, dtype: torch.dtype, weight: BlockScaled) -> bool:
    """Whether `fp8_gemm` takes this many rows as they are, and should get them so: one bfloat16 row on Hopper."""
    if not weight.values.is_cuda:
        return False
    # Imported here: a machine without a GPU may lack CUDA's bindings.
    from kernels.linear import row_products

    return row_products.takes(rows, dtype, weight)


def fp8_gemm(x: torch.Tensor | Quantized, weight: BlockScaled, workspace: Workspace) -> torch.Tensor:
    """x times the weight transposed.

    x: [rows, inputs], unquantized only if the function above says so; weight: [outputs, inputs], outputs a multiple of
    64; workspace: that of the current stream. Returns [rows, outputs] bfloat16; no rows give no rows. On Hopper few
    rows and many go to our CUDA kernels, or to deep_gemm if it works and is faster; the rest goes to our Triton kernel.
    """
    if isinstance(x, torch.Tensor):
        from kernels.linear import row_products

        return row_products.multiply(x, weight)
    assert x.values.dim() == weight.values.dim() == 2 and x.values.shape[1] == weight.values.shape[1]
    assert weight.values.shape[0] % 64 == 0
    if not x.values.is_cuda:
        return reference.fp8_gemm(x, weight)
    return _choose(x.values.shape[0], *weight.values.shape, workspace.shares_chip)(x, weight, workspace)


# Layers of a step ask for the same few shapes.
@lru_cache(maxsize=4096)
def _choose(
    rows: int, outputs: int, inputs: int, shares_chip: bool
) -> Callable[[Quantized, BlockScaled, Workspace], torch.Tensor]:
    """What computes a product of this shape on a GPU."""
    # Imported here: CUDA's bindings and Triton come with a CUDA build of torch.
    from kernels.fp8_gemm import few_rows, many_rows, one_row, triton

    if one_row.takes(rows, outputs, inputs) and not shares_chip:
        return lambda x, weight, _: one_row.fp8_gemm(x, weight)
    if few_rows.takes(rows, outputs, inputs):
        tiling = few_rows.choose_tiling(outputs, inputs, shares_chip=shares_chip)
        return lambda x, weight, _: few_rows.fp8_gemm(x, weight, tiling)
    fills_chip = many_rows.takes(rows, outputs)
    if deep_gemm.is_faster(rows, outputs, inputs, fills_chip=fills_chip) and deep_gemm.available():
        return lambda x, weight, _: deep_gemm.fp8_gemm(x, weight)
    return (lambda x, weight, _: many_rows.fp8_gemm(x, weight)) if fills_chip else triton.fp8_gemm
