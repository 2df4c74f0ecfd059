"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), absorbed for decode, expanded for prompts."""

import torch
from torch.nn import functional

from engine.model.config import ModelConfig
from engine.model.context import Absorbed, Expanded, ForwardContext
from engine.model.parameters import Allocator, NamedParameters
from kernels.kv_copy import read_latents, write_latents
from kernels.mla_decode import mla_decode
from kernels.mla_prefill import mla_prefill
from kernels.norm import rms_norm
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
        query, latents = self._project(hidden, context.rotations)
        pool = context.kv_pool[self.index]
        write_latents(latents, context.slots, pool)
        values = hidden.new_empty(len(hidden), self.config.num_attention_heads, self.config.v_head_dim)
        for rows in context.absorbed:
            self._absorbed(rows, query, pool, values)
        for row in context.expanded:
            self._expanded(row, query, latents, pool, values)
        return functional.linear(values.flatten(1), self.output)

    def _project(self, hidden: torch.Tensor, rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [tokens, heads, nope + rope] and latents [tokens, latent + rope], both rotated."""
        config = self.config
        query, latents = functional.linear(hidden, self.input).split([self.input_width, config.latent_dim], dim=1)
        if self.query is not None and self.query_norm is not None:
            query = functional.linear(rms_norm(query, self.query_norm, INNER_EPSILON), self.query)
        query = query.unflatten(1, (config.num_attention_heads, config.qk_head_dim))
        rotate_(query[:, :, config.qk_nope_head_dim :], rotations)
        rotate_(latents[:, config.kv_lora_rank :].unsqueeze(1), rotations)
        compressed = latents[:, : config.kv_lora_rank]
        compressed.copy_(rms_norm(compressed, self.latent_norm, INNER_EPSILON))
        return query, latents

    def _absorbed(self, rows: Absorbed, query: torch.Tensor, pool: torch.Tensor, values: torch.Tensor) -> None:
        config = self.config
        query = query[rows.first : rows.stop]
        absorbed = query.new_empty(len(query), config.num_attention_heads, config.latent_dim)
        nope, rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=2)
        absorbed[:, :, : config.kv_lora_rank] = torch.bmm(nope.transpose(0, 1), self.absorb_query).transpose(0, 1)
        absorbed[:, :, config.kv_lora_rank :] = rope
        attended = mla_decode(absorbed, pool, rows.plan, value_width=config.kv_lora_rank, scale=config.softmax_scale)
        values[rows.first : rows.stop] = torch.bmm(attended.transpose(0, 1), self.absorb_value).transpose(0, 1)

    def _expanded(
        self, row: Expanded, query: torch.Tensor, latents: torch.Tensor, pool: torch.Tensor, values: torch.Tensor
    ) -> None:
        config, own = self.config, slice(row.first, row.stop)
        known = read_latents(pool, row.runs, latents.dtype) if row.cached else latents[own]
        expanded = functional.linear(known[:, : config.kv_lora_rank], self.expand)
        expanded = expanded.unflatten(1, (config.num_attention_heads, -1))
        nope, value = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=2)
        rope = known[:, None, config.kv_lora_rank :].expand(-1, config.num_attention_heads, -1)
        values[own] = mla_prefill(query[own], torch.cat([nope, rope], dim=2), value, scale=config.softmax_scale)
