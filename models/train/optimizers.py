"""The optimizer and the learning rate of each parameter."""

from typing import Any

import torch

from models.train.indexer import INDEXERS
from models.train.model import TinyModel
from models.train.muon import Muon
from models.train.recipe import Recipe

# Matrices that are tables or read-outs rather than maps between hidden states.
ADAM_MATRICES = ("embed_tokens", "lm_head", "gate.weight")


class Optimizers:
    """Muon for the matrices within layers; Adam for embeddings, head, gates, norms and indexers.

    The rates are tensors on the device, so that a captured step sees them change.
    """

    def __init__(self, model: TinyModel, recipe: Recipe) -> None:
        self.recipe = recipe
        self.rates = torch.zeros(4, device=model.cosine.device)
        self.matrix_rate, self.rate, self.index_rate, self.balance_speed = self.rates.unbind()
        named = [(name, value) for name, value in model.named_parameters() if INDEXERS not in name]
        indexers = [value for name, value in model.named_parameters() if INDEXERS in name]
        matrices = [value for name, value in named if _is_matrix(name, value)]
        self.muon = Muon(matrices, self.matrix_rate, recipe.matrix_decay)
        others = [value for name, value in named if not _is_matrix(name, value)]
        groups: list[dict[str, Any]] = [{"params": others, "lr": self.rate}]
        if indexers:
            groups.append({"params": indexers, "lr": self.index_rate})
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.95), capturable=self.rates.is_cuda)

    def set_rates(self, progress: float) -> None:
        """Set the rates for this point in training. progress: the share of the training time that has passed."""
        recipe = self.recipe
        factor = recipe.rate_factor(progress)
        balance = recipe.balance_speed if progress < recipe.balance_until else 0.0
        rates = recipe.matrix_rate * factor, recipe.rate * factor, recipe.index_rate * factor, balance
        self.rates.copy_(torch.tensor(rates))

    def step(self) -> None:
        """Update, and clear the gradients."""
        self.muon.step()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        for group, rate in zip(self.adam.param_groups, (self.rate, self.index_rate), strict=False):
            group["lr"] = rate


def _is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() >= 2 and not any(part in name for part in ADAM_MATRICES)
