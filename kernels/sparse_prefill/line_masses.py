"""How much attention lies on each line of keys and of distances: the definition, in plain torch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

BLOCK_KEYS = 64
COMPRESSED = torch.float8_e4m3fn
LARGEST = torch.finfo(COMPRESSED).max
# The most scores held at a time. Very long contexts take fewer heads at once.
MOST_SCORES = 1 << 26


@dataclass(frozen=True, slots=True)
class LineMasses:
    """What a prompt's last queries attend to: sums of their softmax weights. A block is 64 keys or 64 distances.

    The last queries and a block of keys meet in up to three blocks of distances. For the block of keys j, the middle
    one is (position of the first query) // 64 - j.
    """

    # [heads, blocks] float32: the heaviest key of each block, and the heaviest distance of each.
    columns: torch.Tensor
    slashes: torch.Tensor
    # [heads, blocks, 3] float32: each block of keys by the blocks of distances that it meets, nearest first.
    parts: torch.Tensor


def line_masses(query: torch.Tensor, key: torch.Tensor, scale: float) -> LineMasses:
    """query: [queries, heads, width], the prompt's last; key: [keys, heads or 1, width], of one dtype, or e4m3: then
    queries are rounded to that too, each with a scale of its own for each head.
    """
    if key.dtype == COMPRESSED:
        query, key = _rounded(query.float()), key.float()
    found = [_masses(weights) for weights in _weights(query, key, scale)]
    columns, slashes, parts = (torch.cat(each) for each in zip(*found, strict=True))
    return LineMasses(columns, slashes, parts)


def _rounded(query: torch.Tensor) -> torch.Tensor:
    largest = query.abs().amax(2, keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, 1)
    return (query / scale).clamp(-LARGEST, LARGEST).to(COMPRESSED).float() * scale


def head_scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> Iterator[torch.Tensor]:
    """[some heads, queries, keys], until all heads are done."""
    queries, heads, _ = query.shape
    together = max(MOST_SCORES // (queries * key.shape[0]), 1)
    keys = key.permute(1, 2, 0)
    for first in range(0, heads, together):
        some = query[:, first : first + together].transpose(0, 1)
        own = keys[first : first + together] if key.shape[1] > 1 else keys.expand(some.shape[0], -1, -1)
        yield torch.bmm(some, own).mul_(scale)


def _weights(query: torch.Tensor, key: torch.Tensor, scale: float) -> Iterator[torch.Tensor]:
    """Softmax of the scores: [some heads, queries, keys] float32."""
    queries = query.shape[0]
    later = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
    for scores in head_scores(query, key, scale):
        scores[:, :, -queries:].masked_fill_(later, float("-inf"))
        yield torch.softmax(scores, 2, dtype=torch.float32)


def _masses(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns, slashes and parts of some heads; weights: [heads, queries, keys]."""
    _, queries, keys = weights.shape
    padding = -keys % BLOCK_KEYS
    padded = functional.pad(weights, (0, padding))
    slashes = _heaviest(functional.pad(_by_distance(weights), (0, padding)))
    return _heaviest(padded.sum(1)), slashes, _parts(padded, first=keys - queries)


def _heaviest(lines: torch.Tensor) -> torch.Tensor:
    return lines.view(lines.shape[0], -1, BLOCK_KEYS).amax(2)


def _by_distance(weights: torch.Tensor) -> torch.Tensor:
    """The mass at each distance from query to key: [heads, keys]."""
    heads, queries, keys = weights.shape
    # Backwards, row i begins queries - 1 - i keys before its own; read one column later per row, distances stand below
    # each other.
    width = keys + queries
    backwards = functional.pad(weights.flip(2), (0, queries))
    skewed = backwards.as_strided((heads, queries, keys), (queries * width, width - 1, 1), queries - 1)
    return skewed.sum(1)


def _parts(weights: torch.Tensor, first: int) -> torch.Tensor:
    """[heads, blocks, 3]; weights: [heads, queries, blocks * 64]; first: the position of the first query."""
    queries = weights.shape[1]
    row = torch.arange(queries, device=weights.device).unsqueeze(1) + first % BLOCK_KEYS
    line = (row - torch.arange(BLOCK_KEYS, device=weights.device)) // BLOCK_KEYS
    member = torch.stack([line == which for which in (-1, 0, 1)], dim=2).to(weights.dtype)
    by_block = weights.view(*weights.shape[:2], -1, BLOCK_KEYS).transpose(1, 2).flatten(2)
    return torch.matmul(by_block, member.flatten(0, 1))
