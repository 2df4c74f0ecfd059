"""The lightning indexer (DeepSeek-V3.2, 2025, section 2.1)."""

from dataclasses import dataclass

import torch
from torch import nn

from engine.model.config import ModelConfig
from kernels.index_keys import EPSILON
from models.train.layers import Linear

# What the names of all indexers' parameters have, and no others.
INDEXERS = ".indexer."
# Queries whose scores are held at a time.
CHUNK = 1024


@dataclass(frozen=True)
class IndexParts:
    """What the scores of a batch are made of."""

    # [tokens, heads, width] and [tokens, width], rotated.
    queries: torch.Tensor
    keys: torch.Tensor
    # float32 [tokens, heads]: how much a head's score counts.
    weights: torch.Tensor

    def scores(self, rows: slice | torch.Tensor, stop: int) -> torch.Tensor:
        """float32 [rows, stop]: how much these tokens' queries want each of the batch's first `stop` tokens."""
        products = torch.einsum("qhw,kw->qhk", self.queries[rows], self.keys[:stop]).relu()
        return (products * self.weights[rows, :, None]).sum(1)


class Indexer(nn.Module):
    """Parameters are named as in the published checkpoints."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.indexer is not None and config.q_lora_rank is not None
        assert not config.indexer.interleaved
        self.config = config.indexer
        heads, width = self.config.heads, self.config.width
        self.wq_b = Linear(config.q_lora_rank, heads * width)
        self.wk = Linear(config.hidden_size, width)
        self.k_norm = nn.LayerNorm(width, eps=EPSILON)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)

    def forward(
        self, x: torch.Tensor, compressed: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> IndexParts:
        """x: [tokens, hidden]; compressed: attention's compressed queries, [tokens, q_lora_rank]. No gradient passes
        to either: the model learns nothing from the indexer's loss.
        """
        x, compressed = x.detach(), compressed.detach()
        queries = self.wq_b(compressed).unflatten(-1, (self.config.heads, -1))
        keys = self.k_norm(self.wk(x).float()).to(x.dtype)
        weights = self.weights_proj(x.float()) * (self.config.width * self.config.heads) ** -0.5
        return IndexParts(
            rotate_halves(queries, cosine[:, None], sine[:, None]), rotate_halves(keys, cosine, sine), weights
        )


def rotate_halves(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the leading numbers of x [..., width] by the angles [..., rope / 2]: pairs are rope / 2 apart."""
    pairs = cosine.shape[-1]
    first, second, rest = x.float().split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine, rest), dim=-1).to(x.dtype)


def choose_tokens(parts: IndexParts, starts: torch.Tensor, count: int) -> torch.Tensor:
    """bool [tokens, tokens]: by query the `count` tokens with the highest scores, or all that it sees if they are
    fewer. starts: int64 [tokens], where each token's document begins.
    """
    tokens = len(starts)
    chosen = torch.zeros(tokens, tokens, dtype=torch.bool, device=starts.device)
    with torch.no_grad():
        for first in range(0, tokens, CHUNK):
            rows = torch.arange(first, min(first + CHUNK, tokens), device=starts.device)
            stop = first + len(rows)
            seen = visible(rows, starts[rows], stop)
            scores = parts.scores(slice(first, stop), stop).masked_fill(~seen, float("-inf"))
            best = scores.topk(min(count, stop), dim=-1, sorted=False).indices
            chosen[first:stop, :stop].scatter_(1, best, value=True).logical_and_(seen)
    return chosen


def visible(rows: torch.Tensor, starts: torch.Tensor, stop: int) -> torch.Tensor:
    """bool [rows, stop]: which of the batch's first tokens each row sees, that is those of its document up to itself.
    rows, starts: int64 [rows].
    """
    token = torch.arange(stop, device=rows.device)
    return (token <= rows[:, None]) & (token >= starts[:, None])
