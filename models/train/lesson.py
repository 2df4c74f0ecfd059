"""What indexers learn: to foresee which tokens attention goes to (DeepSeek-V3.2, 2025, section 2.1.1)."""

from dataclasses import dataclass, field

import torch
from torch.nn import functional


@dataclass(frozen=True)
class LayerLesson:
    """One layer's attention and its indexer's scores. All [rows, tokens]."""

    # float32: each query's attention, summed over the heads and divided by the sum of all; without a gradient.
    masses: torch.Tensor
    # float32: the indexer's scores.
    scores: torch.Tensor
    # bool: the tokens that attention went to.
    allowed: torch.Tensor

    def loss(self) -> torch.Tensor:
        """The Kullback-Leibler divergence of the scores' softmax from the masses, mean over the rows."""
        logs = self._allowed_scores().log_softmax(dim=-1).masked_fill(~self.allowed, 0.0)
        return functional.kl_div(logs, self.masses, reduction="sum") / len(self.masses)

    def recall(self, count: int) -> torch.Tensor:
        """Mean masses of `count` tokens: those with the highest scores, those with the highest masses, and any; [3]."""
        count = min(count, self.scores.shape[1])
        chosen = self.masses.gather(1, self._allowed_scores().topk(count).indices)
        best = self.masses.topk(count).values
        share = (count / self.allowed.sum(1)).clamp(max=1)
        return torch.stack((chosen.sum(1).mean(), best.sum(1).mean(), share.mean()))

    def _allowed_scores(self) -> torch.Tensor:
        return self.scores.masked_fill(~self.allowed, float("-inf"))


@dataclass(frozen=True)
class Lesson:
    # int64 [rows]: the tokens whose queries' attention is to be foreseen.
    rows: torch.Tensor
    # Layers append theirs.
    layers: list[LayerLesson] = field(default_factory=list)

    def loss(self) -> torch.Tensor:
        """The sum of the layers'."""
        return torch.stack([layer.loss() for layer in self.layers]).sum()
