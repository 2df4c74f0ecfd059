"""The gate's linear layer, whose results are float32 whatever its operands are."""

import torch
from torch.nn import functional


def gate_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden: [tokens, width]; weight: [experts, width], bfloat16 or float32. Returns [tokens, experts] float32.

    bfloat16 operands on a GPU are multiplied as they are and summed in float32: their products are exact there.
    """
    assert hidden.shape[1] == weight.shape[1]
    if hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return functional.linear(hidden.float(), weight.float())
