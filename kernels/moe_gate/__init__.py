"""The choice of experts of DeepSeek-V3 (2024), section 2.1.2: sigmoid affinities, a balance bias, limited groups."""

import torch

from kernels.moe_gate import reference


def router_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each token's product with each expert's vector, summed and returned in float32.

    hidden: [tokens, width]; weight: [experts, width], of the hidden state's dtype or float32. Returns [tokens, experts]
    float32; no tokens give none. Backend: the reference.
    """
    assert hidden.shape[1] == weight.shape[1]
    return reference.router_logits(hidden, weight)


def moe_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    experts_per_token: int,
    groups: int,
    groups_per_token: int,
    normalize: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for each token ("noaux_tc").

    logits: [tokens, experts] float32; bias: [experts] float32, added to the affinities for the choice only, never to
    the weights. The experts lie in `groups` equal groups; a token may use `groups_per_token` of them, those whose two
    best sums of affinity and bias are largest. `normalize` makes a token's weights sum to 1, `scaling` multiplies them.
    Returns (weights [tokens, experts_per_token] float32, experts [tokens, experts_per_token] int64, distinct, in no
    order). What is not a number is chosen last; a token of such logits alone still gets distinct experts. No tokens
    give none. Backend: the reference.
    """
    assert logits.dtype == torch.float32 and bias.shape == logits.shape[1:] and bias.dtype == torch.float32
    assert logits.shape[1] % groups == 0 and experts_per_token <= logits.shape[1] // groups * groups_per_token
    return reference.moe_gate(logits, bias, experts_per_token, groups, groups_per_token, normalize, scaling)
