"""Group-limited choice of experts in plain torch: the definition, and the settings of a gate."""

from dataclasses import dataclass

import torch

# The choice of a token that no expert is to compute.
NO_EXPERT = -1


@dataclass(frozen=True, slots=True)
class Routing:
    """The settings of a gate, the same for all tokens."""

    experts_per_token: int
    # Experts form this many equal groups. A token may use `groups_per_token` of them: those whose two best sums of
    # affinity and bias are largest; of softmax affinities, those whose best one is.
    groups: int
    groups_per_token: int
    # Whether a token's weights are normalized to sum to 1, and the factor that multiplies them in either case.
    normalize: bool
    scaling: float
    # Shared experts: they have no logits, are numbered after the others, and always have a weight of 1.
    shared: int
    # Whether affinities are the softmax of all logits (DeepSeek-V2) rather than each logit's sigmoid.
    softmax: bool = False

    @property
    def places(self) -> int:
        """The number of a token's experts, including shared ones."""
        return self.experts_per_token + self.shared


def moe_gate(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing, counted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    affinity = logits.softmax(dim=1) if routing.softmax else logits.sigmoid()
    # NaN comes last: a broken token must not disturb the choice of experts for others.
    choice = (affinity + bias).nan_to_num(nan=float("-inf"))
    if routing.groups_per_token < routing.groups:
        choice = _limit_to_groups(choice, routing.groups, routing.groups_per_token, 1 if routing.softmax else 2)
    experts = choice.topk(routing.experts_per_token, dim=1, sorted=False).indices
    weights = affinity.gather(1, experts)
    if routing.normalize:
        weights /= weights.sum(dim=1, keepdim=True) + 1e-20
    (tokens, count), shared = logits.shape, routing.shared
    always = torch.arange(count, count + shared, device=experts.device).expand(tokens, shared)
    chosen = torch.cat([experts, always], 1)
    if counted is not None:
        chosen = chosen.masked_fill(~counted.unsqueeze(1), NO_EXPERT)
    return torch.cat([weights * routing.scaling, weights.new_ones(tokens, shared)], 1), chosen


def _limit_to_groups(choice: torch.Tensor, groups: int, groups_per_token: int, counted: int) -> torch.Tensor:
    """Set the choices of all groups but the token's best to minus infinity. counted: how many of a group's largest
    choices are added up to rank it.
    """
    grouped: torch.Tensor = choice.unflatten(1, (groups, -1))
    totals = grouped.topk(min(counted, grouped.shape[2]), dim=2).values.sum(dim=2)
    refused = totals.topk(groups - groups_per_token, dim=1, largest=False, sorted=False).indices
    return grouped.scatter(1, refused.unsqueeze(2).expand(-1, -1, grouped.shape[2]), float("-inf")).view_as(choice)
