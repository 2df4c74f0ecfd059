"""A linear layer with a large weight, such as a model's head. With few rows its time is that of reading the weight."""

import torch

from kernels.linear import reference


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transposed weight, summed in float32.

    x: [rows, inputs]; weight: [outputs, inputs] of the same dtype; both contiguous. Returns [rows, outputs] of that
    dtype. On Hopper our kernel takes few bfloat16 rows with a large weight; torch does all else.
    """
    assert x.shape[1] == weight.shape[1] and x.dtype == weight.dtype
    assert x.is_contiguous() and weight.is_contiguous()
    if x.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.linear import triton

        if triton.takes(x, weight):
            return triton.linear(x, weight)
    return reference.linear(x, weight)
