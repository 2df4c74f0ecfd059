"""The choice of experts. DeepSeek-V3's (2024), section 2.1.2: sigmoid affinities, a balance bias, limited groups.
DeepSeek-V2's (2024), section 2.2: softmax affinities, limited groups.

`gate_logits` is the gate's linear layer, whose results are always float32; `moe_gate` chooses.
"""

import torch
from torch.nn import functional

from kernels.moe_gate import reference
from kernels.moe_gate.reference import NO_EXPERT, Routing

__all__ = ["NO_EXPERT", "Routing", "gate_logits", "moe_gate"]

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
    from kernels.moe_gate import few_tokens, triton

    if few_tokens.takes(hidden, weight):
        return few_tokens.gate_logits(hidden, weight)
    return triton.gate_logits(hidden, weight)


def moe_gate(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing, counted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for each token ("noaux_tc"; with softmax affinities "greedy" or "group_limited_greedy").

    logits: [tokens, experts] float32, contiguous, or [shares, tokens, experts], whose sum they are; bias: [experts]
    float32, added to the affinities for the choice only, never to the weights; counted: [tokens] bool, contiguous, if
    not all tokens are: all choices of the others are NO_EXPERT.

    Returns (weights [tokens, places] float32, experts [tokens, places] int64): a token's experts are distinct and in no
    order, but shared ones come last. NaN is chosen last; a token whose logits are all NaN still gets distinct experts.
    """
    assert (
        logits.dtype == torch.float32
        and logits.is_contiguous()
        and bias.shape == logits.shape[-1:]
        and bias.dtype == torch.float32
    )
    experts = logits.shape[-1]
    assert experts % routing.groups == 0
    assert counted is None or (counted.dtype == torch.bool and counted.is_contiguous())
    assert routing.experts_per_token <= experts // routing.groups * routing.groups_per_token
    shares = logits if logits.dim() == 3 else logits.unsqueeze(0)
    if logits.is_cuda:
        # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
        from kernels.moe_gate import choice, triton

        if choice.takes(shares, routing):
            return choice.moe_gate(shares, bias, routing, counted)
        return triton.moe_gate(shares, bias, routing, counted)
    return reference.moe_gate(shares.sum(0), bias, routing, counted)
