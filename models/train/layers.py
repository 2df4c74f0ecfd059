"""The parts of a layer, over a flat batch of tokens: several documents one after the other, not padded."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from models.train.fake_quantization import quantized_activation, quantized_weight
from models.train.lesson import Lesson

# Queries whose weights are computed at a time where a mask says what each attends to.
ROWS = 2048


@dataclass(frozen=True)
class Layout:
    """Where each document of a flat batch begins and ends."""

    # int32 [documents + 1]: where each begins, and where the last ends; repeated ends are empty documents.
    boundaries: torch.Tensor
    # At least the length of the longest document.
    longest: int
    # float32 [tokens, rope / 2] each: the rotation at each token's position in its document.
    cosine: torch.Tensor
    sine: torch.Tensor
    # None if no indexer learns.
    lesson: Lesson | None = None

    @property
    def starts(self) -> torch.Tensor:
        """int64 [tokens]: where each token's document begins."""
        token = torch.arange(len(self.cosine), dtype=torch.int32, device=self.boundaries.device)
        return self.boundaries[torch.searchsorted(self.boundaries, token, right=True) - 1].long()


class Linear(nn.Module):
    """x W^T with W in float32, computed in x's dtype. `fp8`: whether x and W are rounded as in FP8 inference."""

    def __init__(self, inputs: int, outputs: int, deviation: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (inputs**-0.5 if deviation is None else deviation))
        self.fp8 = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, fp8=self.fp8)


def linear(x: torch.Tensor, weight: torch.Tensor, *, fp8: bool) -> torch.Tensor:
    """x [tokens, inputs] times weight [outputs, inputs] transposed, in x's dtype."""
    if fp8:
        x, weight = quantized_activation(x), quantized_weight(weight)
    return functional.linear(x, weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden, deviation=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x0, x1), (x2, x3), ... of x [..., rope] by the angles [..., rope / 2]; dtype kept."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2).to(x.dtype)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """Causal attention within each document: query and key [tokens, heads, qk], value and result [tokens, heads, v]."""
    width = value.shape[-1]
    if query.is_cuda:
        # The kernel requires query, key and value to have the same width.
        value = functional.pad(value, (0, query.shape[-1] - width))
        ends, longest = layout.boundaries, layout.longest
        out = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))
        assert isinstance(out, torch.Tensor)
        return out[..., :width]
    sizes = [size for size in layout.boundaries.diff().tolist() if size]
    queries, keys, values = (x.transpose(0, 1).split(sizes, dim=1) for x in (query, key, value))
    parts = [
        functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(parts, dim=1).transpose(0, 1)


def attend_to_chosen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, scale: float
) -> torch.Tensor:
    """As `attend`, of each query to the tokens that are chosen for it. chosen: bool [tokens, tokens], none of them
    after the query.
    """
    parts = []
    for first in range(0, len(query), ROWS):
        rows = slice(first, min(first + ROWS, len(query)))
        weights = attention_weights(query[rows], key[: rows.stop], chosen[rows, : rows.stop], scale)
        parts.append(torch.einsum("hqk,khv->qhv", weights.to(value.dtype), value[: rows.stop]))
    return torch.cat(parts)


def attention_weights(query: torch.Tensor, key: torch.Tensor, allowed: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 [heads, rows, tokens]: the softmax over the allowed tokens. query: [rows, heads, qk]; key: [tokens,
    heads, qk]; allowed: bool [rows, tokens].
    """
    # In float32, as fused kernels keep their scores. Products of bfloat16 numbers are exact in TF32.
    scores = torch.einsum("qhd,khd->hqk", query.float() * scale, key.float())
    return scores.masked_fill_(~allowed, float("-inf")).softmax(dim=-1)
