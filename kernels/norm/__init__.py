"""Root mean square normalization (Zhang and Sennrich, 2019), of two inputs and after a residual addition."""

from types import ModuleType

import torch

from kernels.act_quant import Quantized, empty_quantized
from kernels.fp8_gemm.operands import BlockScaled
from kernels.moe_permute import ExpertOutputs, combine
from kernels.norm import reference
from kernels.norm.gated import Gated

# The output of a layer, which is added to the residual.
Delta = torch.Tensor | ExpertOutputs
# A weight that rows are multiplied by as they are: [outputs, inputs] contiguous.
Matrix = torch.Tensor | BlockScaled


def join_rms_norms(
    first: torch.Tensor, second: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, normalized in float32: two inputs side by side.

    first, second: [rows, width] of one dtype, last dimension contiguous; the weights: [width] each. Returns a new
    [rows, 2 * width]; no rows give no rows.
    """
    assert first.shape == second.shape and first.dim() == 2 and first.stride(1) == second.stride(1) == 1
    for weight in (first_weight, second_weight):
        assert weight.shape == first.shape[1:] and weight.dtype == first.dtype == second.dtype
    joined: torch.Tensor = _backend(first).join_rms_norms(first, second, first_weight, second_weight, epsilon)
    return joined


def add_rms_norm(delta: Delta, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Add `delta` to `residual` in place, and return the sum normalized as `join_rms_norms` does.

    delta, residual: [rows, width] of one dtype, the residual contiguous, and delta's last dimension. Experts'
    outputs are added up first, and rounded. weight: [width].
    """
    plain = torch.empty_like(residual)
    _add_rms_norm(delta, residual, weight, epsilon, plain, None)
    return plain


def add_rms_norm_quantized(
    delta: Delta, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, powers: bool = False
) -> Quantized:
    """`add_rms_norm` that returns the normalized rows quantized. The width is a multiple of 128.

    powers: whether scales are powers of two.
    """
    quantized = empty_quantized(*residual.shape, device=residual.device, powers=powers)
    _add_rms_norm(delta, residual, weight, epsilon, None, quantized)
    return quantized


def add_rms_norm_in_both_forms(
    delta: Delta, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, powers: bool = False
) -> tuple[torch.Tensor, Quantized]:
    """`add_rms_norm` that returns the normalized rows plain and quantized. The gate reads the plain ones, FP8 products
    the quantized ones.

    The width is a multiple of 128. powers: whether scales are powers of two.
    """
    plain = torch.empty_like(residual)
    quantized = empty_quantized(*residual.shape, device=residual.device, powers=powers)
    _add_rms_norm(delta, residual, weight, epsilon, plain, quantized)
    return plain, quantized


def add_rms_norm_and_logits(
    delta: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    gate: torch.Tensor,
    *,
    quantizes: bool,
    powers: bool = False,
) -> Gated | None:
    """`add_rms_norm` that leaves the residual as it is and returns another one, with the gate's logits of the result.

    gate: [experts, width] contiguous, bfloat16 or float32; quantizes: in FP8 too, with scales that are powers of two if
    `powers`. None where no kernel computes both at once: only for a few rows on Hopper.
    """
    if not residual.is_cuda:
        return None
    # Imported here: a machine without a GPU may lack Triton.
    from kernels.norm import few_rows

    if not few_rows.takes(delta, residual, gate):
        return None
    return few_rows.add_rms_norm_and_logits(delta, residual, weight, epsilon, gate, quantizes=quantizes, powers=powers)


def add_rms_norm_and_multiply(
    delta: Delta,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    matrix: Matrix,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`add_rms_norm`, and the result, which is not quantized, times a transposed matrix, [outputs, width] contiguous.

    Leaves the residual as it is; returns another one and the product, [rows, outputs]. None where no kernel does both:
    only for one bfloat16 row on Hopper.
    """
    assert isinstance(delta, ExpertOutputs) or delta.stride(1) == 1
    if not residual.is_cuda:
        return None
    # Imported here: a machine without a GPU may lack Triton.
    from kernels.norm import multiplied

    if not multiplied.takes(delta, matrix):
        return None
    return multiplied.add_rms_norm_and_multiply(delta, residual, weight, epsilon, matrix)


def rms_norm_and_multiply(x: torch.Tensor, weight: torch.Tensor, epsilon: float, matrix: Matrix) -> torch.Tensor | None:
    """x: [rows, width], normalized as `join_rms_norms` does, times the transposed matrix, [outputs, width] contiguous.

    weight: [width]. Returns [rows, outputs]; None where no kernel does both: only for one bfloat16 row on Hopper.
    """
    assert x.stride(1) == 1 and x.shape[1:] == weight.shape
    if not x.is_cuda:
        return None
    # Imported here: a machine without a GPU may lack Triton.
    from kernels.norm import multiplied

    return multiplied.rms_norm_and_multiply(x, weight, epsilon, matrix) if multiplied.takes(x, matrix) else None


def _add_rms_norm(
    delta: Delta,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    plain: torch.Tensor | None,
    quantized: Quantized | None,
) -> None:
    """Fills the forms that are given."""
    assert delta.shape == residual.shape and weight.shape == residual.shape[1:] and residual.is_contiguous()
    assert isinstance(delta, ExpertOutputs) or delta.stride(1) == 1
    if (clusters := _clusters(delta, residual)) is not None:
        clusters.add_rms_norm(delta, residual, weight, epsilon, plain, quantized)
    else:
        added = combine(delta) if isinstance(delta, ExpertOutputs) else delta
        _backend(residual).add_rms_norm(added, residual, weight, epsilon, plain, quantized)


def _clusters(delta: Delta, residual: torch.Tensor) -> ModuleType | None:
    """The module whose kernel has a cluster of CTAs for each row; None if it does not take these."""
    if not residual.is_cuda:
        return None
    from kernels.norm import clusters

    return clusters if clusters.takes(delta, residual) else None


def _backend(x: torch.Tensor) -> ModuleType:
    if x.is_cuda:
        from kernels.norm import triton

        return triton
    return reference
