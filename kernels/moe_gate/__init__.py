"""The choice of experts of DeepSeek-V3 (2024), section 2.1.2: sigmoid affinities, a balance bias, limited groups."""

import torch

from kernels.moe_gate import reference


def moe_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    experts_per_token: int,
    groups: int,
    groups_per_token: int,
    normalize: bool,
    scaling: float,
    shared: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for each token ("noaux_tc").

    logits: [tokens, experts] float32, contiguous, or [shares, tokens, experts], which add up to them; bias: [experts]
    float32, added to the affinities for the choice only, never to the weights. The experts lie in `groups` equal
    groups; a token may use `groups_per_token` of them, those whose two best sums of affinity and bias are largest.
    `normalize` makes a token's weights sum to 1, `scaling` multiplies them. Behind the chosen come `shared` experts
    that no logits stand for, numbered after the others, each of weight 1 whatever the settings.

    Returns (weights [tokens, experts_per_token + shared] float32, experts of that shape int64, distinct, the chosen in
    no order). What is not a number is chosen last; a token of such logits alone still gets distinct experts. No tokens
    give none.
    """
    assert (
        logits.dtype == torch.float32
        and logits.is_contiguous()
        and bias.shape == logits.shape[-1:]
        and bias.dtype == torch.float32
    )
    experts = logits.shape[-1]
    assert experts % groups == 0 and experts_per_token <= experts // groups * groups_per_token
    settings = (experts_per_token, groups, groups_per_token, normalize, scaling, shared)
    shares = logits if logits.dim() == 3 else logits.unsqueeze(0)
    if logits.is_cuda:
        # Imported here: a machine without a GPU may lack what they need.
        from kernels.moe_gate import choice, triton

        backend = choice if choice.takes(shares, experts_per_token, groups, shared) else triton
        return backend.moe_gate(shares, bias, *settings)
    return reference.moe_gate(shares.sum(0), bias, *settings)
