"""The gate's linear layer. Its results are always float32."""

import torch
from torch.nn import functional

# Up to this many tokens our kernels are faster than cuBLAS, which does not divide long sums among programs.
MOST_TOKENS = 256


def gate_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden: [tokens, width]; weight: [experts, width], bfloat16 or float32, contiguous.

    Returns [shares, tokens, experts] float32: the logits are the sum over the shares, which `moe_gate` adds up. On a
    GPU bfloat16 operands are multiplied without conversion and summed in float32, in which their products are exact.
    Few tokens go to our kernels, whose programs share long sums; many go to cuBLAS, in one share.
    """
    assert hidden.shape[1] == weight.shape[1] and hidden.stride(1) == 1 and weight.is_contiguous()
    if not hidden.is_cuda or not hidden.dtype == weight.dtype == torch.bfloat16:
        return functional.linear(hidden.float(), weight.float()).unsqueeze(0)
    if hidden.shape[0] > MOST_TOKENS:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32).unsqueeze(0)
    # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
    from kernels.moe_gate import few_tokens, triton_logits

    if few_tokens.takes(hidden, weight):
        return few_tokens.gate_logits(hidden, weight)
    return triton_logits.gate_logits(hidden, weight)
