"""The lines of attention that hold most of a head's mass, found from a prompt's last queries."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

BLOCK_KEYS = 64
# MInference's.
LAST_QUERIES = 64
# The most scores held at a time. Very long contexts take fewer heads at once.
MOST_SCORES = 1 << 26


@dataclass(frozen=True, slots=True)
class Selection:
    """What each head attends to. Line b of a kind is 64 lines of one key or one distance, from 64 b on."""

    # [heads, blocks] bool: columns, keys that all queries behind them attend to.
    columns: torch.Tensor
    # [heads, blocks] bool: slashes, distances from a query to a key.
    slashes: torch.Tensor

    @property
    def heads(self) -> int:
        return self.columns.shape[0]

    @property
    def blocks(self) -> int:
        return self.columns.shape[1]


def select_lines(query: torch.Tensor, key: torch.Tensor, *, scale: float, recall: float) -> Selection:
    """The fewest of the heaviest lines that hold the share `recall` (0 to 1) of these queries' attention, per head.

    query: [queries, heads, width], the prompt's last, 64 by custom; key: [keys, heads or 1, width], all of the prompt,
    so that the last query sees all of them; one key for all heads is MLA's absorbed form. The first block of keys and
    the last two of distances are always kept: there the softmax puts what it has no use for (Xiao et al., "Streaming
    language models with attention sinks", 2024), and each query sees itself. Nothing here waits for the device.
    """
    assert 1 <= query.shape[0] <= key.shape[0] and 0 <= recall <= 1
    found = [_select(weights, recall) for weights in _weights(query, key, scale)]
    columns, slashes = zip(*found, strict=True)
    return Selection(torch.cat(columns), torch.cat(slashes))


def attention_log_sums(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """log(sum(exp(scale * query . key))) over all keys up to each query's position: [heads, queries] float32.

    query: [queries, heads, width]; key: [keys, heads or 1, width]; positions: [queries] int64.
    """
    hidden = torch.arange(key.shape[0], device=key.device) > positions.unsqueeze(1)
    groups = _scores(query.float(), key.float(), scale)
    return torch.cat([scores.masked_fill_(hidden, float("-inf")).logsumexp(2) for scores in groups])


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> Iterator[torch.Tensor]:
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
    for scores in _scores(query, key, scale):
        scores[:, :, -queries:].masked_fill_(later, float("-inf"))
        yield torch.softmax(scores, 2, dtype=torch.float32)


def _select(weights: torch.Tensor, recall: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and slashes of some heads, [heads, blocks] each; weights: [heads, queries, keys].

    A line of 64 is as heavy as its heaviest, since a key or a distance that matters stands out among its neighbours.
    The last queries and a block of keys meet in up to three lines of distances. Such a part of the attention is kept
    if its column or its slash is, so it is as heavy as the heavier of the two. The heaviest parts are taken until their
    mass is enough; the lightest of them is the bound for lines.
    """
    _, queries, keys = weights.shape
    blocks = -(-keys // BLOCK_KEYS)
    padded = functional.pad(weights, (0, blocks * BLOCK_KEYS - keys))
    columns = _heaviest(padded.sum(1))
    slashes = _heaviest(functional.pad(_by_distance(weights), (0, blocks * BLOCK_KEYS - keys)))
    # They are above any sum of weights, so that they are kept whatever the bound is.
    columns[:, 0] = slashes[:, :2] = float("inf")
    parts = _parts(padded, first=keys - queries)
    block, neighbour = (torch.arange(*span, device=weights.device) for span in ((0, blocks), (-1, 2)))
    distance = (keys - queries) // BLOCK_KEYS - block.unsqueeze(1) + neighbour
    crossing = slashes[:, distance.clamp(0, blocks - 1)].masked_fill(distance < 0, 0)
    weight, order = torch.maximum(columns.unsqueeze(2), crossing).flatten(1).sort(descending=True)
    mass = parts.flatten(1).gather(1, order).cumsum(1)
    enough = (mass < recall * queries).sum(1, keepdim=True).clamp(max=weight.shape[1] - 1)
    bound = weight.gather(1, enough)
    return columns >= bound, slashes >= bound


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
    """[heads, blocks, 3]: the mass of each block of keys in the lines of distances that it meets, nearest first.

    weights: [heads, queries, blocks * 64]; first: the position of the first query. The middle line of block j is
    first // 64 - j.
    """
    queries = weights.shape[1]
    row = torch.arange(queries, device=weights.device).unsqueeze(1) + first % BLOCK_KEYS
    line = (row - torch.arange(BLOCK_KEYS, device=weights.device)) // BLOCK_KEYS
    member = torch.stack([line == which for which in (-1, 0, 1)], dim=2).to(weights.dtype)
    by_block = weights.view(*weights.shape[:2], -1, BLOCK_KEYS).transpose(1, 2).flatten(2)
    return torch.matmul(by_block, member.flatten(0, 1))
