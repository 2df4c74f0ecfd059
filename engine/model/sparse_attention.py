"""A prompt's attention to what counts in it: found in the absorbed form, computed in the expanded one, part by part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from engine.model.sparse_meter import SparseMeter
from kernels.mla_prefill import merge_attention
from kernels.sparse_prefill import (
    BLOCK_KEYS,
    TILE_QUERIES,
    Selection,
    attention_log_sums,
    kept_blocks,
    sparse_prefill,
)


@dataclass(frozen=True, slots=True)
class SparseRow:
    """Tokens [first, stop) of the batch: a row whose attention leaves out what hardly counts."""

    first: int
    stop: int
    # Position of the first.
    start: int
    # [keys] int64: slots of the row and of all that is before it.
    slots: torch.Tensor
    # Where its keys are cut, so that not too many are expanded at once: multiples of 64, and the end.
    bounds: Sequence[int]
    recall: float
    # The layer in which it is measured what is kept, and the meter that is told.
    measured_layer: int
    meter: SparseMeter
    # [samples] int64: indices of the row's queries that are measured.
    sampled: torch.Tensor

    @property
    def queries(self) -> int:
        return self.stop - self.first


def attend(
    row: SparseRow,
    selection: Selection,
    query: torch.Tensor,
    expand: Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query: [queries, heads, nope + rope], rotated; expand: from where keys begin and end to both parts of the keys,
    and values, as `mla_prefill` takes them. Returns like it.
    """
    # A generator, so that only one part of the keys is expanded at a time.
    parts = (
        sparse_prefill(query, *expand(begin, end), selection, first_query=row.start, first_key=begin, scale=scale)
        for begin, end in pairwise(row.bounds)
    )
    # All queries see the first part's first block, so no log-sum is minus infinity behind it.
    values, log_sum = next(parts)
    for part in parts:
        merge_attention(values, log_sum, *part)
    return values, log_sum


def measure(
    row: SparseRow,
    selection: Selection,
    sampled: torch.Tensor,
    latents: torch.Tensor,
    log_sum: torch.Tensor,
    scale: float,
) -> None:
    """Tell the meter how much of the exact attention was kept, and how much of its work was done.

    sampled: the row's sampled queries, absorbed, [samples, heads, latent + rope]; latents: [keys, latent + rope].
    """
    exact = attention_log_sums(sampled, latents.unsqueeze(1), row.sampled + row.start, scale=scale)
    recall = (log_sum[:, row.sampled] - exact).exp().clamp(max=1).mean()
    kept = torch.stack([
        kept_blocks(selection, row.queries, end - begin, first_query=row.start, first_key=begin).sum()
        for begin, end in pairwise(row.bounds)
    ])  # fmt: skip
    last = (min(first + TILE_QUERIES, row.queries) + row.start for first in range(0, row.queries, TILE_QUERIES))
    all_blocks = selection.heads * sum(-(-seen // BLOCK_KEYS) for seen in last)
    row.meter.note(recall, kept.sum() / all_blocks)
