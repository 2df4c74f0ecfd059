"""Linear layers of experts: each group of rows has a matrix of its own."""

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.operands import BlockScaled
from kernels.grouped_gemm import deep_gemm, reference
from kernels.hopper import is_hopper
from kernels.moe_permute.layout import ContiguousLayout, Layout, ListedRows
from kernels.swiglu import swiglu


def grouped_gemm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of group g by weights[g] transposed. Group g has rows ends[g - 1] to ends[g], the first from 0.

    x: [rows, inputs] contiguous; weights: [groups, outputs, inputs] of the same dtype; ends: [groups] int32, ascending,
    the last one the number of rows. Returns [rows, outputs]; empty groups cost nothing, no rows give none.
    """
    assert x.shape[1] == weights.shape[2] and x.dtype == weights.dtype and x.is_contiguous()
    assert ends.shape == weights.shape[:1] and ends.dtype == torch.int32
    if x.is_cuda and x.dtype == torch.float32:
        # torch's own makes the host wait in float32, and only small models use float32.
        return reference.all_groups_gemm(x, weights, ends)
    if x.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.grouped_gemm import few_rows, many_rows

        if many_rows.takes(x, weights):
            return many_rows.grouped_gemm(x, weights, ends)
        if few_rows.takes(x, weights):
            return few_rows.grouped_gemm(x, weights, ends)
    return reference.grouped_gemm(x, weights, ends)


def grouped_swiglu(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`swiglu` of `grouped_gemm`: the first half of a group's outputs gates the second half.

    weights: [groups, 2 * width, inputs]; the others as `grouped_gemm` takes them. Returns [rows, width]; on a GPU our
    kernels round the product once, after the gate.
    """
    assert x.shape[1] == weights.shape[2] and x.dtype == weights.dtype and x.is_contiguous()
    assert weights.shape[1] % 2 == 0 and ends.shape == weights.shape[:1] and ends.dtype == torch.int32
    if x.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.grouped_gemm import few_rows, many_rows

        if many_rows.takes(x, weights):
            return many_rows.grouped_gemm(x, weights, ends, gated=True)
        if few_rows.takes(x, weights):
            return few_rows.grouped_gemm(x, weights, ends, gated=True)
    return swiglu(grouped_gemm(x, weights, ends))


def chosen_feed_forward(
    x: torch.Tensor | Quantized,
    choices: torch.Tensor,
    gate_up: torch.Tensor | BlockScaled,
    down: torch.Tensor | BlockScaled,
    first: int,
    shared: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the chosen experts make of each token: bfloat16 rows and positions, as `ExpertOutputs` has them.

    x: [tokens, hidden], quantized if weights have scales; choices: [tokens, places] int64 contiguous, distinct within a
    token, numbered from `first` on, the `shared` last experts at the last places; gate_up: [experts, 2 * width,
    hidden]; down: [experts, hidden, width], both contiguous. None where no kernel finds rows by choices: only for one
    token on Hopper.
    """
    assert choices.dtype == torch.int64 and choices.is_contiguous()
    if not choices.is_cuda:
        return None
    # Imported here: a machine without a GPU may lack Triton.
    from kernels.grouped_gemm import one_token

    if not one_token.takes(x, gate_up):
        return None
    return one_token.feed_forward(x, choices, gate_up, down, first, shared)


def listed_feed_forward(x: torch.Tensor, listed: ListedRows, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """What the chosen experts make of each token: rows, as `ExpertOutputs` has them with the list's positions.

    x: [tokens, hidden] bfloat16; gate_up: [experts, 2 * width, hidden]; down: [experts, hidden, width], all contiguous.
    """
    # Imported here: a machine without a GPU may lack Triton.
    from kernels.grouped_gemm import few_rows

    return few_rows.listed_feed_forward(x, listed, gate_up, down)


def grouped_fp8_gemm(x: Quantized, weight: BlockScaled, layout: Layout) -> torch.Tensor:
    """Multiply each row by its expert's weight transposed, with the arithmetic of `fp8_gemm`.

    x: [rows, inputs] or [experts, capacity, inputs], in the layout; weight: [experts, outputs, inputs], outputs
    a multiple of 128. Returns bfloat16 of x's leading dimensions and `outputs`; unused rows are undefined. Only the
    device reads the counts. On a GPU this runs deep_gemm if it works and is faster for the layout, otherwise
    our kernels: for a contiguous layout on Hopper the one in CUDA, else the one in Triton.
    """
    assert x.values.shape == (*layout.shape, weight.values.shape[2])
    assert weight.values.dim() == 3 and weight.values.shape[1] % 128 == 0
    if not x.values.is_cuda:
        return reference.grouped_fp8_gemm(x, weight, layout)
    if deep_gemm.is_faster(layout, weight) and deep_gemm.available():
        return deep_gemm.grouped_fp8_gemm(x, weight, layout)
    if isinstance(layout, ContiguousLayout) and is_hopper():
        from kernels.fp8_gemm import many_rows

        return many_rows.sorted_fp8_gemm(x, weight, layout.row_experts)
    from kernels.grouped_gemm import triton

    return triton.grouped_fp8_gemm(x, weight, layout)
