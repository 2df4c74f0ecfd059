"""Attention of a prompt to the keys that matter: chosen in the absorbed form, attended to in the expanded form."""

from collections import deque
from dataclasses import dataclass

import torch

from engine.model.expanded_attention import Expand, cut_heads
from engine.protocol.messages import SparseMeasure
from kernels.act_quant import QuantizedRows
from kernels.host_copy import HostCopies
from kernels.sparse_prefill import (
    BLOCK_KEYS,
    TILE_QUERIES,
    Selection,
    attention_log_sums,
    kept_blocks,
    sparse_prefill,
    sparse_prefill_and_quantize,
)

# Queries of a chunk that are measured, spread evenly: together they cost as much as one block of exact attention.
MOST_SAMPLES = 16


class SparseMeter:
    """Samples of how much sparse attention keeps, while they are copied from the device: layers write, the backend
    reads. A chunk is measured in one layer, and which one changes from chunk to chunk.
    """

    def __init__(self) -> None:
        self._copies: deque[HostCopies] = deque()

    def note(self, recall: torch.Tensor, density: torch.Tensor) -> None:
        """Both are tensors of one number."""
        self._copies.append(HostCopies((recall, density)))

    def drain(self) -> list[SparseMeasure]:
        """The samples that have reached the host since the last call. Does not wait."""
        measures = []
        while self._copies and self._copies[0].done:
            recall, density = self._copies.popleft().read()
            measures.append(SparseMeasure(float(recall), float(density)))
        return measures


@dataclass(frozen=True, slots=True)
class SparseRow:
    """Tokens [first, stop) of the batch: a row whose attention leaves out keys that hardly matter."""

    first: int
    stop: int
    # Position of the first token.
    start: int
    # [keys] int64: slots of the row and of all that is before it.
    slots: torch.Tensor
    # As in `ExpandedRows`.
    expanded: int
    recall: float
    # The layer in which it is measured how much is kept, and the meter that is told.
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
    expand: Expand,
    value_width: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query: [queries, heads, nope + rope], rotated. Returns [queries, heads, value] and the log-sums that
    `sparse_prefill` writes.
    """
    queries, heads, _ = query.shape
    values = query.new_empty(queries, heads, value_width)
    log_sum = query.new_empty(heads, queries, dtype=torch.float32)
    for some in cut_heads(heads, len(row.slots), row.expanded):
        keys, results = expand(some), (values[:, some], log_sum[some])
        sparse_prefill(query[:, some], *keys, selection.of(some), *results, first_query=row.start, scale=scale)
        # Freed before the next keys are expanded.
        del keys
    return values, log_sum


def attend_and_quantize(
    row: SparseRow,
    selection: Selection,
    query: torch.Tensor,
    expand: Expand,
    out: QuantizedRows,
    scale: float,
) -> None:
    """`attend`, whose outputs are quantized for the product that reads them; out: [queries, heads * value]."""
    heads = query.shape[1]
    width = out.values.shape[1] // heads
    for some in cut_heads(heads, len(row.slots), row.expanded):
        keys, columns = expand(some), out.columns(some.start * width, some.stop * width)
        sparse_prefill_and_quantize(
            query[:, some], *keys, selection.of(some), columns, first_query=row.start, scale=scale
        )
        # Freed before the next keys are expanded.
        del keys


def measure(
    row: SparseRow,
    selection: Selection,
    sampled: torch.Tensor,
    latents: torch.Tensor,
    log_sum: torch.Tensor,
    scale: float,
) -> None:
    """Tell the meter how much of the exact attention was kept, and how much of its work was done.

    sampled: the row's sampled queries, absorbed, [samples, heads, latent + rope]; latents: [keys, latent + rope], as
    the pool stores them; scale: that of their products.
    """
    exact = attention_log_sums(sampled, latents.unsqueeze(1), row.sampled + row.start, scale=scale)
    recall = (log_sum[:, row.sampled] - exact).exp().clamp(max=1).mean()
    kept = kept_blocks(selection, row.queries, len(latents), row.start).sum()
    last = (min(first + TILE_QUERIES, row.queries) + row.start for first in range(0, row.queries, TILE_QUERIES))
    all_blocks = selection.heads * sum(-(-seen // BLOCK_KEYS) for seen in last)
    row.meter.note(recall, kept / all_blocks)
