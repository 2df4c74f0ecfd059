"""Linear layers in the model's dtype, or in shares of float32. Few rows take as long as reading the weight."""

import torch
from torch.nn import functional

from kernels.linear import reference

# Up to this many tokens our kernels are faster than cuBLAS, which does not divide long sums among programs.
MOST_TOKENS = 256


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transposed weight, summed in float32.

    x: [rows, inputs]; weight: [outputs, inputs] of the same dtype, contiguous. Returns [rows, outputs] of that
    dtype. On Hopper our kernels take up to 64 bfloat16 rows, with weights of the sizes for which they were measured;
    torch does all else.
    """
    assert x.shape[1] == weight.shape[1] and x.dtype == weight.dtype
    assert weight.is_contiguous()
    if x.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.linear import clusters, few_rows, one_row, row_products, triton

        if triton.takes(x, weight):
            return triton.linear(x, weight)
        if one_row.takes(x, weight):
            return one_row.linear(x, weight)
        if row_products.takes(len(x), x.dtype, weight) and x.stride(1) == 1 and x.data_ptr() % 16 == 0:
            return row_products.multiply(x, weight)
        if few_rows.takes(x.unsqueeze(1), weight.unsqueeze(0)):
            return few_rows.multiply_groups(x.unsqueeze(1), weight.unsqueeze(0)).squeeze(1)
        if clusters.takes(x, weight):
            return clusters.linear(x, weight)
    return reference.linear(x, weight)


def multiply_in_shares(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden: [tokens, width]; weight: [outputs, width], few of them, bfloat16 or float32, contiguous.

    Returns [shares, tokens, outputs] float32: the product is the sum over the shares, which the kernel that reads them
    adds up, such as the one that chooses experts. On a GPU bfloat16 operands are multiplied without conversion and
    summed in float32, in which their products are exact. Few tokens go to our kernels, whose programs share long sums;
    many go to cuBLAS, in one share.
    """
    assert hidden.shape[1] == weight.shape[1] and hidden.stride(1) == 1 and weight.is_contiguous()
    if not hidden.is_cuda or not hidden.dtype == weight.dtype == torch.bfloat16:
        return functional.linear(hidden.float(), weight.float()).unsqueeze(0)
    if hidden.shape[0] > MOST_TOKENS:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32).unsqueeze(0)
    # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
    from kernels.linear import few_tokens, triton_shares

    if few_tokens.takes(hidden, weight):
        return few_tokens.multiply_in_shares(hidden, weight)
    return triton_shares.multiply_in_shares(hidden, weight)
