"""Linear layers in the model's dtype. With few rows their time is that of reading the weight."""

import torch

from kernels.linear import reference


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transposed weight, summed in float32.

    x: [rows, inputs]; weight: [outputs, inputs] of the same dtype, contiguous. Returns [rows, outputs] of that
    dtype. On Hopper our kernels take few bfloat16 rows with a large weight, such as a model's head, and a few rows with
    any other; torch does all else.
    """
    assert x.shape[1] == weight.shape[1] and x.dtype == weight.dtype
    assert weight.is_contiguous()
    if x.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.linear import few_rows, triton

        if triton.takes(x, weight):
            return triton.linear(x, weight)
        if few_rows.takes(x.unsqueeze(1), weight.unsqueeze(0)):
            return few_rows.multiply_groups(x.unsqueeze(1), weight.unsqueeze(0)).squeeze(1)
    return reference.linear(x, weight)
