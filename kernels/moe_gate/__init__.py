"""The choice of experts. DeepSeek-V3's (2024), section 2.1.2: sigmoid affinities, a balance bias, limited groups.
DeepSeek-V2's (2024), section 2.2: softmax affinities, limited groups.

The gate's linear layer is `kernels.linear.multiply_in_shares`.
"""

import torch

from kernels.moe_gate import reference
from kernels.moe_gate.reference import NO_EXPERT, Routing

__all__ = ["NO_EXPERT", "Routing", "moe_gate"]


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
