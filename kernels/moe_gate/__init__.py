"""The choice of experts. DeepSeek-V3's (2024), section 2.1.2: sigmoid affinities, a balance bias, limited groups.
DeepSeek-V2's (2024), section 2.2: softmax affinities, limited groups.

The gate's linear layer is `kernels.linear.multiply_in_shares`, unless one kernel does all from the norm
on: `add_rms_norm_and_choose`.
"""

import torch

from kernels.moe_gate import reference
from kernels.moe_gate.listed import Listed
from kernels.moe_gate.reference import NO_EXPERT, Routing

__all__ = ["NO_EXPERT", "Listed", "Routing", "add_rms_norm_and_choose", "chooses_at_once", "moe_gate"]


def chooses_at_once(delta: torch.Tensor, weight: torch.Tensor, routing: Routing) -> bool:
    """Whether `add_rms_norm_and_choose` takes these: 2 to 32 bfloat16 tokens, 64 or 128 experts without groups."""
    if not delta.is_cuda:
        return False
    # Imported here: a machine without a GPU may lack CUDA's bindings.
    from kernels.moe_gate import placed

    return placed.takes(delta, weight, routing)


def add_rms_norm_and_choose(
    delta: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    routing: Routing,
    counted: torch.Tensor | None = None,
) -> Listed:
    """`kernels.norm.add_rms_norm`, the gate's linear layer of the result, `moe_gate` and the rows of all choices.

    Of what it takes (`chooses_at_once`). delta, residual: [tokens, width]; norm: [width]; weight: [experts, width];
    bias: [experts] float32, or a row for each token; the others as `moe_gate` takes them.
    """
    from kernels.moe_gate import placed

    return placed.choose(delta, residual, norm, epsilon, weight, bias, routing, counted)


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
