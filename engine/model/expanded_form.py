"""A layer's attention in the expanded form, of prompts: to all keys, to those that a mask shows, or to a few lines."""

import torch

from engine.model import expanded_attention, sparse_attention
from engine.model.activations import WrittenRows, write
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.expanded_attention import Expand, ExpandedKeys, ExpandedRows
from engine.model.expansion import Expansion, Latents
from engine.model.sparse_attention import SparseRow, measure
from kernels.kv_copy import read_latents
from kernels.mla_projections import absorb_query
from kernels.rope import rotate_
from kernels.sparse_prefill import LAST_QUERIES, Selection, select_lines


class ExpandedForm:
    """Belongs to a layer's `Attention`. It rotates the queries of its rows in place.

    query: [tokens, heads, nope + rope] of the batch, not rotated yet; latents: [tokens, latent + rope] of it. A row's
    values go to `out`: [its tokens, heads * value].
    """

    def __init__(self, config: ModelConfig, index: int, expansion: Expansion, absorb_query: torch.Tensor) -> None:
        """index: of the layer, in the pool; absorb_query: [heads, nope, latent], what takes queries to the latent."""
        self.config = config
        self._index = index
        self._expansion = expansion
        self._absorb_query = absorb_query

    def attend(
        self,
        row: ExpandedRows,
        query: torch.Tensor,
        latents: torch.Tensor,
        context: ForwardContext,
        out: WrittenRows,
        mask: torch.Tensor | None = None,
    ) -> None:
        """mask: as of `mla_prefill`."""
        rotated = self._rotated(row, query, context)
        expand = self._expand(self._known(row, latents, context), context)
        expanded_attention.attend(row, rotated, expand, out, self.config.softmax_scale, mask)

    def measures(self, row: SparseRow) -> bool:
        """Whether this layer measures what the row's attention leaves out."""
        return self._index == row.measured_layer

    def attend_sparsely(self, row: SparseRow, query: torch.Tensor, context: ForwardContext, out: WrittenRows) -> None:
        if isinstance(out, torch.Tensor) or self.measures(row):
            write(self._sparse_values(row, query, context).flatten(1), out)
            return
        query = query[row.first : row.stop]
        selection = self._select(row, query, self._stored(row, context), context)
        expand = self._expand(self._read(row.slots, context), context)
        sparse_attention.attend_and_quantize(row, selection, query, expand, out, self.config.softmax_scale)

    def _sparse_values(self, row: SparseRow, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[queries, heads, value], with the log-sums that measuring takes."""
        query, rotations = query[row.first : row.stop], context.rotations[row.first : row.stop]
        latents, sampled = self._stored(row, context), None
        if self.measures(row):
            sampled = absorb_query(query[row.sampled], self._absorb_query, rotations[row.sampled])
        selection = self._select(row, query, latents, context)
        expand, scale = self._expand(self._read(row.slots, context), context), self.config.softmax_scale
        values, log_sum = sparse_attention.attend(row, selection, query, expand, self.config.v_head_dim, scale)
        if sampled is not None:
            measure(row, selection, sampled, latents, log_sum, scale * context.kv_scale)
        return values

    def _rotated(self, row: ExpandedRows, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The row's queries, rotated in place."""
        query = row.of(query)
        rotate_(query[:, :, self.config.qk_nope_head_dim :], row.of(context.rotations))
        return query

    def _known(self, row: ExpandedRows, latents: torch.Tensor, context: ForwardContext) -> Latents:
        """Latents that the row attends to: those of its prefix, and its own."""
        return self._expansion.computed(row.of(latents)) if row.known is None else self._read(row.known, context)

    def _read(self, slots: torch.Tensor, context: ForwardContext) -> Latents:
        return self._expansion.read(context.kv_pool[self._index], slots, context.kv_scale)

    def _stored(self, row: SparseRow, context: ForwardContext) -> torch.Tensor:
        """Latents in the pool's dtype: lines are chosen from products in e4m3 if the pool is e4m3."""
        pool = context.kv_pool[self._index]
        return read_latents(pool, row.slots, pool.dtype)

    def _select(self, row: SparseRow, query: torch.Tensor, latents: torch.Tensor, context: ForwardContext) -> Selection:
        """Chooses the lines that the row's queries attend to, and rotates the queries in place. latents: as the pool
        stores them.
        """
        rotations, last = context.rotations[row.first : row.stop], slice(-LAST_QUERIES, None)
        absorbed = absorb_query(query[last], self._absorb_query, rotations[last])
        scale = self.config.softmax_scale * context.kv_scale
        selection = select_lines(absorbed, latents.unsqueeze(1), scale=scale, recall=row.recall)
        rotate_(query[:, :, self.config.qk_nope_head_dim :], rotations)
        return selection

    def _expand(self, latents: Latents, context: ForwardContext) -> Expand:
        widths = self.config.qk_nope_head_dim, self.config.v_head_dim
        each = sum(widths)

        def expand(heads: slice) -> ExpandedKeys:
            rows = slice(heads.start * each, heads.stop * each)
            expanded = self._expansion.forward(latents, context.workspace, rows)
            nope, value = expanded.view(len(expanded), -1, each).split_with_sizes(widths, dim=2)
            return nope, latents.shared, value

        return expand
