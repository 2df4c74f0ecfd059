"""Muon: momentum whose matrices are orthogonalized (Jordan et al., 2024, "Muon: An optimizer for hidden layers")."""

from collections import defaultdict
from collections.abc import Iterable

import torch

from models.train.precision import working_dtype

MOMENTUM = 0.95
# Coefficients of the quintic iteration. Its authors tuned them for speed rather than for exact convergence.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest semi-orthogonal matrices. matrices: [count, rows, columns]; their singular values become
    about 1. Bfloat16 is enough, if the device is fast in it.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x.to(working_dtype(x.device))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon:
    """Updates weight matrices. Leading dimensions count as separate matrices. Equal shapes are updated together."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], learning_rate: torch.Tensor, weight_decay: float
    ) -> None:
        """learning_rate: a scalar tensor, read at every step."""
        self.groups: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for parameter in parameters:
            self.groups[parameter.shape].append(parameter)
        self.momenta = {
            shape: [torch.zeros_like(member, requires_grad=False) for member in members]
            for shape, members in self.groups.items()
        }
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter by its gradient, and clear the gradients. Shapes without gradients stay."""
        for shape, members in self.groups.items():
            gradients = [member.grad for member in members if member.grad is not None]
            if not gradients:
                continue
            assert len(gradients) == len(members)
            momenta = self.momenta[shape]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            nesterov = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            rows, columns = shape[-2:]
            updates = orthogonalize(torch.stack(tuple(nesterov)).view(-1, rows, columns)).float()
            # This makes the size of an update per output the same for all shapes.
            updates *= self.learning_rate * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(members, 1 - self.learning_rate * self.weight_decay)
            torch._foreach_sub_(members, list(updates.view(len(members), *shape)))
            for member in members:
                member.grad = None

    def state_dict(self) -> list[list[torch.Tensor]]:
        return list(self.momenta.values())

    def load_state_dict(self, state: list[list[torch.Tensor]]) -> None:
        for momenta, saved in zip(self.momenta.values(), state, strict=True):
            for momentum, values in zip(momenta, saved, strict=True):
                momentum.copy_(values)
