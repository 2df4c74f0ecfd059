"""Routing in which some experts are chosen more often than others."""

import torch

from bench.rank.model import UniformLogits


class SkewedLogits(UniformLogits):
    """Logits whose highest k are k experts drawn by popularity, without replacement (Gumbel's trick)."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        """All experts are equally popular at first."""
        super().__init__(layers)
        # [experts] float32; changed in place, because captured steps read it.
        self._log_popularity = torch.zeros(experts, device=device)

    def set_popularity(self, popularity: torch.Tensor) -> None:
        """Set the experts' popularity: [experts], in any unit."""
        self._log_popularity.copy_((popularity / popularity.max()).log())

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        drawn = torch.zeros(self._layers, *like.shape, device=like.device)
        # The gate adds up several shares of the logits: use only the first.
        gumbel = torch.empty_like(drawn[:, 0]).exponential_().log_().neg_()
        drawn[:, 0] = gumbel + self._log_popularity
        return drawn


def zipf(experts: int, exponent: float) -> torch.Tensor:
    """[experts], the first the most popular. If ranks hold experts in order, their loads are as uneven as possible."""
    return torch.arange(1, experts + 1).double().pow(-exponent).float()
