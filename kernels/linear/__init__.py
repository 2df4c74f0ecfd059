"""A linear layer whose weight is so large that few rows wait for nothing but its reading: a model's head."""

import torch

from kernels.linear import reference


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transposed weight, summed in float32.

    x: [rows, inputs]; weight: [outputs, inputs] of the same dtype; both contiguous. Returns [rows, outputs] of that
    dtype. Few rows of bfloat16 by a large weight are ours on Hopper; all else is torch's.
    """
    assert x.shape[1] == weight.shape[1] and x.dtype == weight.dtype
    assert x.is_contiguous() and weight.is_contiguous()
    if x.is_cuda:
        # Imported here: a machine without a GPU may lack it.
        from kernels.linear import triton

        if triton.takes(x, weight):
            return triton.linear(x, weight)
    return reference.linear(x, weight)
