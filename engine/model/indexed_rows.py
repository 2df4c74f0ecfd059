"""Rows whose queries attend to the tokens that indexers select."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from engine.model.indexer_config import MOST_SCORES
from kernels.kv_copy import BLOCK_TOKENS, COMPRESSED, read_latents
from kernels.mla_decode import DecodePlan


@dataclass(slots=True)
class Choice:
    """What the last layer with an indexer of its own has selected; None before the first. Layers write and read it."""

    # [queries, top_k] int32, from `top_tokens`.
    tokens: torch.Tensor | None = None


@dataclass(slots=True)
class RoundedLatents:
    """The latents of one request in e4m3, for prompts that attend in FP8 though the pool keeps more. The first of a
    prompt's parts makes them in each layer.
    """

    # [tokens] int64: slots of all tokens of its blocks.
    slots: torch.Tensor
    # [1, blocks] int32: where its blocks lie here, which is in order.
    block_table: torch.Tensor
    _layer: int | None = None
    _latents: torch.Tensor | None = None

    def of_layer(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        """[blocks, 64, width] e4m3. pool: of that layer."""
        if self._latents is None or self._layer != layer:
            # The layer's before it is freed first.
            self._latents, self._layer = None, layer
            self._latents = read_latents(pool, self.slots, COMPRESSED).view(-1, *pool.shape[1:])
        return self._latents


@dataclass(frozen=True, slots=True)
class IndexedRows:
    """Tokens [first, stop) of the batch: rows of equal length, one after another."""

    first: int
    stop: int
    plan: DecodePlan
    # [queries] int32: how many tokens each query sees, itself included.
    seen: torch.Tensor
    # As `plan`, of where `latents` has what they attend to.
    attended: DecodePlan
    # None if they attend to what the pool has.
    rounded: RoundedLatents | None = None
    choice: Choice = field(default_factory=Choice)

    def latents(self, kv_pool: torch.Tensor, layer: int) -> torch.Tensor:
        """[blocks, 64, width]: what they attend to in this layer."""
        return kv_pool[layer] if self.rounded is None else self.rounded.of_layer(kv_pool[layer], layer)


def indexed_rows(first: int, stop: int, plan: DecodePlan, rounded: RoundedLatents | None = None) -> IndexedRows:
    own = torch.arange(1 - plan.query_tokens, 1, dtype=torch.int32, device=plan.lengths.device)
    attended = plan
    if rounded is not None:
        attended = replace(plan, block_table=rounded.block_table, runs=None)
    return IndexedRows(first, stop, plan, (plan.lengths.unsqueeze(1) + own).flatten(), attended, rounded)


def rounded_latents(block_table: torch.Tensor) -> RoundedLatents:
    """block_table: [1, blocks] int32, of the request."""
    blocks, device = block_table[0].long(), block_table.device
    slots = blocks.unsqueeze(1) * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)
    own = torch.arange(len(blocks), dtype=torch.int32, device=device).unsqueeze(0)
    return RoundedLatents(slots.flatten(), own)


def cut_queries(first: int, stop: int, context: int) -> Iterator[tuple[int, int]]:
    """Cut a prompt's tokens [first, stop) into parts whose scores are no more than MOST_SCORES. context: of the last
    token.
    """
    most = max(MOST_SCORES // context, 1)
    return ((start, min(start + most, stop)) for start in range(first, stop, most))
