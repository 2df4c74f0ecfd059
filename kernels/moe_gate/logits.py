"""The gate's linear layer, whose results are float32 whatever its operands are."""

import torch
from torch.nn import functional

# Up to here ours is faster than cuBLAS, which does not share out long sums.
MOST_TOKENS = 256


def gate_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden: [tokens, width]; weight: [experts, width], bfloat16 or float32, contiguous.

    Returns [shares, tokens, experts] float32, whose sum over the shares the logits are: `moe_gate` adds them up.
    bfloat16 operands on a GPU are multiplied as they are and summed in float32: their products are exact there. For few
    tokens ours, whose sums are shared out by programs; cuBLAS for many, in one share.
    """
    assert hidden.shape[1] == weight.shape[1] and hidden.stride(1) == 1 and weight.is_contiguous()
    if not hidden.is_cuda or not hidden.dtype == weight.dtype == torch.bfloat16:
        return functional.linear(hidden.float(), weight.float()).unsqueeze(0)
    if hidden.shape[0] > MOST_TOKENS:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32).unsqueeze(0)
    # Imported here: a machine without a GPU may lack what they need.
    from kernels.moe_gate import few_tokens, triton_logits

    if few_tokens.takes(hidden, weight):
        return few_tokens.gate_logits(hidden, weight)
    return triton_logits.gate_logits(hidden, weight)
