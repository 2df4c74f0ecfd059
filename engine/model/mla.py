"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), absorbed for decode, expanded for prompts."""

import torch
from torch.nn import functional

from engine.model.config import ModelConfig
from engine.model.context import Absorbed, Expanded, ForwardContext
from engine.model.parameters import Allocator, NamedParameters
from kernels.kv_copy import read_latents
from kernels.kv_write import norm_and_write
from kernels.mla_decode import absorb_query, expand_values, mla_decode
from kernels.mla_prefill import mla_prefill
from kernels.rope import rotate_

# As published: the inner norms do not follow rms_norm_eps.
INNER_EPSILON = 1e-6


class Attention:
    """One layer's attention. Its latents live in layer `index` of the pool: normalized latent, then rotated key."""

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator) -> None:
        self.config = config
        self.index = index
        heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        queries = heads * config.qk_head_dim
        self.input_width = config.q_lora_rank or queries
        # The queries' first projection and the latent's, which read the same input.
        self.input = allocate(self.input_width + config.latent_dim, hidden)
        self.query_norm = allocate(config.q_lora_rank) if config.q_lora_rank else None
        self.query = allocate(queries, config.q_lora_rank) if config.q_lora_rank else None
        self.latent_norm = allocate(latent)
        self.expand = allocate(heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
        self.output = allocate(hidden, heads * config.v_head_dim)
        # Views of `expand`: [heads, nope, latent] takes queries to the latent, [heads, latent, value] values from it.
        by_head = self.expand.view(heads, -1, latent)
        self.absorb_query = by_head[:, : config.qk_nope_head_dim]
        self.absorb_value = by_head[:, config.qk_nope_head_dim :].transpose(1, 2)

    def parameters(self, prefix: str) -> NamedParameters:
        if self.query is None or self.query_norm is None:
            yield f"{prefix}.q_proj.weight", self.input[: self.input_width]
        else:
            yield f"{prefix}.q_a_proj.weight", self.input[: self.input_width]
            yield f"{prefix}.q_a_layernorm.weight", self.query_norm
            yield f"{prefix}.q_b_proj.weight", self.query
        yield f"{prefix}.kv_a_proj_with_mqa.weight", self.input[self.input_width :]
        yield f"{prefix}.kv_a_layernorm.weight", self.latent_norm
        yield f"{prefix}.kv_b_proj.weight", self.expand
        yield f"{prefix}.o_proj.weight", self.output

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """hidden: [tokens, hidden], normalized. Writes the tokens' latents, returns [tokens, hidden]."""
        pool = context.kv_pool[self.index]
        projected = functional.linear(hidden, self.input)
        query = norm_and_write(
            projected, self.query_norm, self.latent_norm, INNER_EPSILON, context.rotations, context.slots, pool
        )
        if self.query is not None:
            query = functional.linear(query, self.query)
        query = query.unflatten(1, (self.config.num_attention_heads, self.config.qk_head_dim))
        values = hidden.new_empty(len(hidden), self.config.num_attention_heads, self.config.v_head_dim)
        for rows in context.absorbed:
            self._absorbed(rows, query, context.rotations, pool, values)
        for row in context.expanded:
            self._expanded(row, query, projected[:, self.input_width :], context.rotations, pool, values)
        return functional.linear(values.flatten(1), self.output)

    def _absorbed(
        self,
        rows: Absorbed,
        query: torch.Tensor,
        rotations: torch.Tensor,
        pool: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        config, own = self.config, slice(rows.first, rows.stop)
        absorbed = absorb_query(query[own], self.absorb_query, rotations[own])
        attended = mla_decode(absorbed, pool, rows.plan, value_width=config.kv_lora_rank, scale=config.softmax_scale)
        values[own] = expand_values(attended, self.absorb_value)

    def _expanded(
        self,
        row: Expanded,
        query: torch.Tensor,
        latents: torch.Tensor,
        rotations: torch.Tensor,
        pool: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        config, own = self.config, slice(row.first, row.stop)
        rotate_(query[own, :, config.qk_nope_head_dim :], rotations[own])
        known = latents[own] if row.known is None else read_latents(pool, row.known, latents.dtype)
        expanded = functional.linear(known[:, : config.kv_lora_rank], self.expand)
        expanded = expanded.unflatten(1, (config.num_attention_heads, -1))
        nope, value = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=2)
        rope = known[:, None, config.kv_lora_rank :].expand(-1, config.num_attention_heads, -1)
        key = torch.cat([nope, rope], dim=2)
        values[own], _ = mla_prefill(query[own], key, value, row.plan, scale=config.softmax_scale)
