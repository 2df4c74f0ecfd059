"""How the values of several ranks become one tensor."""

from collections.abc import Sequence

import torch


def all_gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))


def sum_in_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, added in float32, unless the values are integers, in the order of the ranks, and rounded once."""
    first, *others = values
    total = first.float() if first.is_floating_point() else first
    for each in others:
        total = total + each
    return total.to(first.dtype)
