"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), absorbed for decode, expanded for prompts."""

from collections.abc import Set
from typing import Any, NamedTuple

import torch

from engine.model.activations import (
    Activations,
    InputForm,
    Normalized,
    WrittenRows,
    clear,
    in_form,
    written_rows,
)
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import AbsorbedRows, Cut, ForwardContext
from engine.model.exchanged_kv import exchange_kv
from engine.model.expanded_form import ExpandedForm
from engine.model.expansion import make_expansion
from engine.model.indexed_rows import IndexedRows
from engine.model.indexer import Indexer, QueryInputs
from engine.model.masked_rows import MaskedRows
from engine.model.parameters import NamedParameters, cut, whole
from engine.model.quantization import LinearKind
from kernels.act_quant import Quantized, empty_quantized
from kernels.fp8_gemm import BlockScaled, takes_unquantized
from kernels.kv_write import norm_and_write, norm_quantize_and_write
from kernels.mla_decode import Attended, mla_decode
from kernels.mla_projections import (
    absorb_query,
    expand_values,
    expand_values_into,
    expand_values_quantized,
    write_and_absorb,
)
from kernels.mla_selected import mla_selected
from kernels.norm import Matrix, rms_norm_and_multiply

# The published model's inner norms do not use rms_norm_eps.
INNER_EPSILON = 1e-6


class Projected(NamedTuple):
    """What attention reads of a step's tokens, in addition to the pool."""

    # [tokens, heads, nope + rope], not rotated yet.
    query: torch.Tensor
    # [tokens, latent + rope]: normalized latents and rotated keys.
    latents: torch.Tensor
    # As `QueryInputs` has them, the scales if compressed queries are quantized; None if the layer has no indexer.
    index_weights: torch.Tensor | None = None
    compressed: torch.Tensor | None = None
    compressed_scales: torch.Tensor | None = None


class Attention:
    """One layer's attention, or the share of its heads that this rank has: then outputs are parts of a sum.

    Its latents live in layer `index` of the pool: normalized latent, then rotated key. Every rank writes them all.
    """

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator, *, indexed: bool) -> None:
        """indexed: whether it has an indexer of its own."""
        self.config = config
        self.index = index
        self._share = allocate.group.share
        self._everybody = allocate.expert_group
        heads = self._heads = self._share.size(config.num_attention_heads)
        hidden, latent = config.hidden_size, config.kv_lora_rank
        queries = heads * config.qk_head_dim
        self._input_width = config.q_lora_rank or queries
        # The queries' first projection and the latent's, which read the same input.
        parts: tuple[int, ...] = (self._input_width, config.latent_dim)
        # And the indexer's keys, if they can be joined. They come first: then each matrix has whole blocks of weights.
        self._key_width = 0
        if indexed and config.indexer is not None:
            joined = config.indexer.width, *parts
            if allocate.joins(LinearKind.INPUT, LinearKind.INDEX, hidden, joined):
                self._key_width, parts = config.indexer.width, joined
        self._input = allocate.linear(LinearKind.INPUT, hidden, parts)
        self._query_norm = allocate(config.q_lora_rank) if config.q_lora_rank else None
        self._query = allocate.linear(LinearKind.QUERY, config.q_lora_rank, (queries,)) if config.q_lora_rank else None
        self._latent_norm = allocate(latent)
        self._expansion = make_expansion(config, heads, allocate)
        self._indexer = Indexer(config, index, allocate, joined=self._key_width > 0) if indexed else None
        self._output = allocate.linear(LinearKind.OUTPUT, heads * config.v_head_dim, (hidden,))
        # Views of the expansion's weight: [heads, nope, latent] takes queries to the latent, [heads, latent, value]
        # takes values from it.
        by_head = self._expansion.weight.view(heads, -1, latent)
        self._absorb_query = by_head[:, : config.qk_nope_head_dim]
        self._absorb_value = by_head[:, config.qk_nope_head_dim :].transpose(1, 2)
        self._expanded = ExpandedForm(config, index, self._expansion, self._absorb_query)
        # The forms in which it reads the tokens.
        self.input_forms: Set[InputForm] = frozenset({self._input.input_form})
        if self._indexer is not None:
            self.input_forms |= self._indexer.input_forms

    def parameters(self, prefix: str) -> NamedParameters:
        query, latent = f"{prefix}.q_proj", f"{prefix}.kv_a_proj_with_mqa"
        if self._query is None or self._query_norm is None:
            for each in self._input.parameters(query, latent):
                yield from cut([each], 0, self._share) if each.name.startswith(query) else [each]
        else:
            keys = [f"{prefix}.indexer.wk"] if self._key_width else []
            yield from self._input.parameters(*keys, f"{prefix}.q_a_proj", latent)
            yield whole(f"{prefix}.q_a_layernorm.weight", self._query_norm)
            yield from cut(self._query.parameters(f"{prefix}.q_b_proj"), 0, self._share)
        if self._indexer is not None:
            yield from self._indexer.parameters(f"{prefix}.indexer")
        yield whole(f"{prefix}.kv_a_layernorm.weight", self._latent_norm)
        yield from cut(self._expansion.parameters(f"{prefix}.kv_b_proj"), 0, self._share)
        yield from cut(self._output.parameters(f"{prefix}.o_proj"), 1, self._share)

    def finish(self) -> None:
        """Called once, when all parameters are filled."""
        self._input.finish()
        if self._query is not None:
            self._query.finish()
        if self._indexer is not None:
            self._indexer.finish()
        self._expansion.finish()
        self._output.finish()

    @property
    def input_weight(self) -> Matrix | None:
        """The weight of the first product, if nothing else reads the input and a kernel may read it."""
        return self._input.weight if self._indexer is None else None

    @property
    def derived_bytes(self) -> int:
        """Bytes that it holds in addition to its parameters."""
        return self._expansion.derived_bytes

    def forward(self, hidden: Normalized, context: ForwardContext) -> torch.Tensor:
        """hidden: [tokens, hidden]. Writes the tokens' latents, returns [tokens, hidden]."""
        projected = hidden.product
        if projected is None:
            projected = self._input.forward(hidden.in_form(self._input.input_form), context.workspace)
        attended = self._attended_at_once(projected, context)
        if attended is not None:
            return self._output.forward(self._expanded_values(attended), context.workspace)
        keys = None
        if self._key_width:
            keys, projected = projected[:, : self._key_width], projected[:, self._key_width :]
        compressed = self._compressed(projected, context)
        inputs = Projected(self._queries(compressed, context), projected[:, self._input_width :])
        if self._indexer is not None:
            self._indexer.write_keys(hidden, keys, context)
            compressed = in_form(compressed, self._indexer.query_form)
            inputs = inputs._replace(index_weights=self._indexer.weigh(hidden))
            if isinstance(compressed, torch.Tensor):
                inputs = inputs._replace(compressed=compressed)
            else:
                inputs = inputs._replace(compressed=compressed.values, compressed_scales=compressed.scales)
        values = self._values(inputs, context) if context.cut is None else self._cut(context.cut, inputs, context)
        return self._output.forward(values, context.workspace)

    def _attended_at_once(self, projected: torch.Tensor, context: ForwardContext) -> Attended | None:
        """Writes the latents and attends, if one kernel does all between the first product and attention."""
        rows = context.only_in_latents()
        if self._indexer is not None or context.cut is not None or context.shared_latents is not None:
            return None
        if not isinstance(rows, AbsorbedRows):
            return None
        query = self._queries_at_once(projected)
        if query is None:
            return None
        by_head, latents = query.view(len(query), self._heads, -1), projected[:, self._input_width :]
        rest = context.rotations, context.slots, context.kv_pool[self.index], context.kv_scale
        absorbed = write_and_absorb(by_head, latents, self._absorb_query, self._latent_norm, INNER_EPSILON, *rest)
        return None if absorbed is None else self._decoded(rows, absorbed, context)

    def _queries_at_once(self, projected: torch.Tensor) -> torch.Tensor | None:
        """[tokens, heads * (nope + rope)], not rotated yet, if no kernel has to stand before their second product."""
        compressed = projected[:, : self._input_width]
        if self._query is None or self._query_norm is None:
            return compressed
        if self._query.weight is None:
            return None
        return rms_norm_and_multiply(compressed, self._query_norm, INNER_EPSILON, self._query.weight)

    def _expanded_values(self, attended: Attended) -> Activations:
        """All heads' values in one row, in the form that the output's product reads."""
        form = self._output.input_form
        if form.quantized and not self._reads_unquantized(attended.latents):
            return expand_values_quantized(attended, self._absorb_value, powers=form.powers)
        return expand_values(attended, self._absorb_value).flatten(1)

    def _reads_unquantized(self, latents: torch.Tensor) -> bool:
        """Whether the output's product reads these tokens' values as they are, though its weight is in FP8."""
        weight = self._output.weight
        return isinstance(weight, BlockScaled) and takes_unquantized(len(latents), latents.dtype, weight)

    def _cut(self, cut: Cut, inputs: Projected, context: ForwardContext) -> Activations:
        """As `_values`, of the context's own rows, which are captured. Those of a step that is run are added then."""
        values = self._values(inputs, context)
        tensors = [each for each in inputs if each is not None]
        if isinstance(values, torch.Tensor):
            cut(self._fill, values, *tensors)
        else:
            cut(self._fill_quantized, values.values, values.scales, *tensors)
        return values

    def _fill(self, values: Activations, *inputs: Any) -> None:
        """inputs: the tensors of `Projected`, and the context."""
        self._attend(Projected(*inputs[:-1]), inputs[-1], values)

    def _fill_quantized(self, values: torch.Tensor, scales: torch.Tensor, *inputs: Any) -> None:
        self._fill(Quantized(values, scales, self._output.input_form.powers), *inputs)

    def _values(self, inputs: Projected, context: ForwardContext) -> Activations:
        """What the output's product reads: [tokens, heads * value] in that product's form."""
        rows = context.only_in_latents()
        if rows is not None and context.shared_latents is None:
            return self._expanded_values(self._attended(rows, inputs, context))
        out = self._empty_values(inputs.query)
        self._attend(inputs, context, out)
        return out

    def _empty_values(self, query: torch.Tensor) -> Activations:
        """Rows for as many tokens, in the form of the output's product."""
        width, form = self._heads * self.config.v_head_dim, self._output.input_form
        if form.quantized:
            return empty_quantized(len(query), width, device=query.device, powers=form.powers)
        return query.new_empty(len(query), width)

    def _attend(self, inputs: Projected, context: ForwardContext, out: Activations) -> None:
        """Fills the values of the context's rows, and of its padding."""
        query, latents, form = inputs.query, inputs.latents, self._expanded
        if context.shared_latents is not None:
            exchange_kv(context, context.shared_latents, self.index, self._everybody)
        # First, because a captured step takes all tokens for padding, those of its rows too.
        if context.padding:
            clear(written_rows(out, len(query) - context.padding, len(query)))
        for rows in context.in_latents():
            attended = self._attended(rows, inputs, context)
            self._write_expanded(attended, written_rows(out, rows.first, rows.stop))
        for row in context.expanded:
            form.attend(row, query, latents, context, written_rows(out, row.first, row.stop))
        for masked in context.masked:
            mask, row = self._mask(masked, inputs, context), masked.row
            form.attend(row, query, latents, context, written_rows(out, row.first, row.stop), mask)
        for sparse in context.sparse:
            form.attend_sparsely(sparse, query, context, written_rows(out, sparse.first, sparse.stop))

    def _write_expanded(self, attended: Attended, out: WrittenRows) -> None:
        """As `_expanded_values`, into existing rows."""
        if isinstance(out, torch.Tensor):
            out.copy_(expand_values(attended, self._absorb_value).flatten(1))
        else:
            expand_values_into(attended, self._absorb_value, out)

    def _compressed(self, projected: torch.Tensor, context: ForwardContext) -> Activations:
        """Writes the latents, normalized. Returns compressed queries, normalized, in the form in which all that read
        them do; or the queries themselves, if they are projected directly.
        """
        pool = context.kv_pool[self.index]
        rest = self._latent_norm, INNER_EPSILON, context.rotations, context.slots, pool, context.kv_scale
        if self._query is None or self._query_norm is None:
            return norm_and_write(projected, None, *rest)
        forms = {self._query.input_form} | (set() if self._indexer is None else {self._indexer.query_form})
        if len(forms) == 1 and self._query.input_form.quantized:
            return norm_quantize_and_write(projected, self._query_norm, *rest, powers=self._query.input_form.powers)
        return norm_and_write(projected, self._query_norm, *rest)

    def _queries(self, compressed: Activations, context: ForwardContext) -> torch.Tensor:
        """[tokens, heads, nope + rope], not rotated yet."""
        if self._query is None:
            assert isinstance(compressed, torch.Tensor)
            query = compressed
        else:
            query = self._query.forward(in_form(compressed, self._query.input_form), context.workspace)
        return query.view(len(query), self._heads, self.config.qk_head_dim)

    def _selected(self, rows: IndexedRows, inputs: Projected, context: ForwardContext) -> torch.Tensor:
        """Attended latents, [tokens, heads, latent], of rows that attend to selected tokens."""
        config, own = self.config, slice(rows.first, rows.stop)
        if self._indexer is not None:
            rows.choice.tokens = self._indexer.select(rows, self._query_inputs(self._indexer, inputs), context)
        assert rows.choice.tokens is not None, "the first layer has an indexer"
        return mla_selected(
            absorb_query(inputs.query[own], self._absorb_query, context.rotations[own]),
            rows.latents(context.kv_pool, self.index),
            rows.attended,
            rows.choice.tokens,
            value_width=config.kv_lora_rank,
            scale=config.softmax_scale,
            kv_scale=context.kv_scale,
        )

    def _query_inputs(self, indexer: Indexer, inputs: Projected) -> QueryInputs:
        values, scales = inputs.compressed, inputs.compressed_scales
        assert values is not None and inputs.index_weights is not None
        found = values if scales is None else Quantized(values, scales, indexer.query_form.powers)
        return QueryInputs(found, inputs.index_weights)

    def _mask(self, rows: MaskedRows, inputs: Projected, context: ForwardContext) -> torch.Tensor:
        """Which keys the rows' queries attend to, as `mla_prefill` takes it."""
        if self._indexer is not None:
            self._indexer.fill_mask(rows, self._query_inputs(self._indexer, inputs), context)
        return rows.mask

    def _attended(self, rows: AbsorbedRows | IndexedRows, inputs: Projected, context: ForwardContext) -> Attended:
        if isinstance(rows, IndexedRows):
            return Attended(self._selected(rows, inputs, context))
        own = slice(rows.first, rows.stop)
        absorbed = absorb_query(inputs.query[own], self._absorb_query, context.rotations[own])
        return self._decoded(rows, absorbed, context)

    def _decoded(self, rows: AbsorbedRows, absorbed: torch.Tensor, context: ForwardContext) -> Attended:
        return mla_decode(
            absorbed,
            context.kv_pool[self.index],
            rows.plan,
            value_width=self.config.kv_lora_rank,
            scale=self.config.softmax_scale,
            kv_scale=context.kv_scale,
        )
