"""Which parameters are updated how."""

from typing import Any

import torch

from tools.train.model import TinyModel
from tools.train.muon import Muon
from tools.train.recipe import Recipe

# Matrices that are tables or read-outs rather than maps between hidden states.
ADAM_MATRICES = ("embed_tokens", "lm_head", "gate.weight")


class Optimizers:
    """Muon for the matrices within layers; Adam for embeddings, head, gates and norms."""

    def __init__(self, model: TinyModel, recipe: Recipe) -> None:
        self.recipe = recipe
        named = list(model.named_parameters())
        self.muon = Muon([value for name, value in named if _is_matrix(name, value)], recipe.matrix_decay)
        others = [value for name, value in named if not _is_matrix(name, value)]
        self.adam = torch.optim.Adam(others, lr=recipe.rate, betas=(0.9, 0.95), fused=others[0].is_cuda)

    def step(self, progress: float) -> None:
        """Update with the rates of this share of the training time, and clear the gradients."""
        factor = self.recipe.rate_factor(progress)
        self.muon.step(self.recipe.matrix_rate * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.recipe.rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def _is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() >= 2 and not any(part in name for part in ADAM_MATRICES)
