"""The lightning indexer: which tokens a layer's queries attend to (DeepSeek-V3.2, 2025, section 2.1)."""

from collections.abc import Set
from dataclasses import dataclass

import torch

from engine.model.activations import Activations, InputForm, Normalized
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.indexed_rows import IndexedRows
from engine.model.masked_rows import MaskedRows
from engine.model.parameters import NamedParameters, whole
from engine.model.quantization import LinearKind
from kernels.act_quant.quantized import SCALE_ALIGNMENT
from kernels.index_keys import IndexQueries, make_queries, write_keys
from kernels.index_scores import index_scores
from kernels.linear import multiply_in_shares
from kernels.mla_prefill import write_mask
from kernels.top_tokens import top_tokens


@dataclass(frozen=True, slots=True)
class QueryInputs:
    """What an indexer makes the queries of a batch's tokens of."""

    # [tokens, q_lora_rank], attention's compressed queries, normalized, in `query_form`.
    compressed: Activations
    # [shares, tokens, heads]: of `weigh`.
    weights: torch.Tensor


class Indexer:
    """Every rank of a TP group has all of it, since all of them have to attend to the same tokens."""

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator, *, joined: bool) -> None:
        """index: of its layer, in the pool of index keys; joined: whether attention's first product has its keys."""
        assert config.indexer is not None and config.q_lora_rank is not None
        self.config = config.indexer
        self._index = index
        heads, width = self.config.heads, self.config.width
        self._query = allocate.linear(LinearKind.INDEX, config.q_lora_rank, (heads * width,))
        self._key = None if joined else allocate.linear(LinearKind.INDEX, config.hidden_size, (width,))
        self._key_norm = allocate(width, dtype=torch.float32)
        self._key_bias = allocate(width, dtype=torch.float32)
        self._weights = allocate(heads, config.hidden_size, dtype=allocate.formats.index_weights_dtype)
        # The forms in which it reads the tokens, and the compressed queries of attention.
        self.input_forms: Set[InputForm] = frozenset({InputForm.PLAIN})
        if self._key is not None:
            self.input_forms |= {self._key.input_form}
        self.query_form = self._query.input_form

    def parameters(self, prefix: str) -> NamedParameters:
        yield from self._query.parameters(f"{prefix}.wq_b")
        if self._key is not None:
            yield from self._key.parameters(f"{prefix}.wk")
        yield whole(f"{prefix}.k_norm.weight", self._key_norm)
        yield whole(f"{prefix}.k_norm.bias", self._key_bias)
        yield whole(f"{prefix}.weights_proj.weight", self._weights)

    def finish(self) -> None:
        """Called once, when all parameters are filled."""
        self._query.finish()
        if self._key is not None:
            self._key.finish()

    def write_keys(self, hidden: Normalized, projected: torch.Tensor | None, context: ForwardContext) -> None:
        """hidden: [tokens, hidden]; projected: [tokens, width], their keys, if attention's first product has them."""
        if self._key is not None:
            projected = self._key.forward(hidden.in_form(self._key.input_form), context.workspace)
        assert projected is not None
        rest = context.rotations, context.slots, self._pool(context)
        write_keys(projected, self._key_norm, self._key_bias, *rest, interleaved=self.config.interleaved)

    def weigh(self, hidden: Normalized) -> torch.Tensor:
        """How much heads count, as `make_queries` takes it. hidden: [tokens, hidden]."""
        return multiply_in_shares(hidden.unquantized(), self._weights)

    def select(self, rows: IndexedRows, tokens: QueryInputs, context: ForwardContext) -> torch.Tensor:
        """The tokens that these rows attend to, [queries, top_k] int32. tokens: all of the batch."""
        scores = index_scores(self._queries(rows, tokens, context), self._pool(context), rows.plan)
        return top_tokens(scores, rows.seen, self.config.top_k)

    def fill_mask(self, rows: MaskedRows, tokens: QueryInputs, context: ForwardContext) -> None:
        """As `select`, into the mask of the rows."""
        for part in rows.parts:
            own = slice(part.first - rows.first, part.stop - rows.first)
            write_mask(self.select(part, tokens, context), rows.mask[:, own])

    def _queries(self, rows: IndexedRows, tokens: QueryInputs, context: ForwardContext) -> IndexQueries:
        # Quantized rows are taken from a multiple of this on.
        before = rows.first % SCALE_ALIGNMENT
        own = slice(rows.first - before, rows.stop)
        projected = self._query.forward(tokens.compressed[own], context.workspace)
        made = make_queries(
            projected.unflatten(1, (self.config.heads, -1)),
            tokens.weights[:, own].contiguous(),
            context.rotations[own],
            self._pool(context),
            # The published scores are scaled by the root of the width, and their weights by that of the heads' number.
            factor=(self.config.width * self.config.heads) ** -0.5,
            interleaved=self.config.interleaved,
        )
        return IndexQueries(made.values[before:], made.weights[before:])

    def _pool(self, context: ForwardContext) -> torch.Tensor:
        assert context.index_pool is not None
        return context.index_pool[self._index]
