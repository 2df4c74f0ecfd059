"""Multi-head latent attention (DeepSeek-V2, section 2.1)."""

import torch
from torch import nn

from engine.model.config import ModelConfig
from models.train.indexer import Indexer, IndexParts, choose_tokens, visible
from models.train.layers import Layout, Linear, Norm, attend, attend_to_chosen, attention_weights, rotate
from models.train.lesson import LayerLesson


class LatentAttention(nn.Module):
    """Parameters are named as in the published checkpoints."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads, epsilon = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        query_rank = config.q_lora_rank
        assert query_rank is not None
        self.q_a_proj = Linear(hidden, query_rank)
        self.q_a_layernorm = Norm(query_rank, epsilon)
        self.q_b_proj = Linear(query_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, config.latent_dim)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, epsilon)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = Linear(heads * config.v_head_dim, hidden, deviation=0.0)
        self.indexer = Indexer(config) if config.indexer else None
        # Whether queries attend to what the indexer chooses.
        self.selects = False

    def forward(self, x: torch.Tensor, layout: Layout, latents: list[torch.Tensor] | None = None) -> torch.Tensor:
        """x: [tokens, hidden]. The latents that a KV cache would keep, [tokens, latent], are appended to `latents`."""
        config = self.config
        compressed_query = self.compressed_query(x)
        query = self.queries(compressed_query, layout.cosine, layout.sine)
        latent = self.latent(x, layout.cosine, layout.sine)
        if latents is not None:
            latents.append(latent)
        compressed, rotated = latent.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        expanded = self.kv_b_proj(compressed).unflatten(-1, (config.num_attention_heads, -1))
        plain, value = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        shared = rotated[:, None, :].expand(-1, config.num_attention_heads, -1)
        key = torch.cat((plain, shared), dim=-1)
        if self.indexer is None or not (self.selects or layout.lesson):
            out = attend(query, key, value, layout, config.softmax_scale)
        else:
            parts = self.indexer(x, compressed_query, layout.cosine, layout.sine)
            out = self._indexed(parts, query, key, value, layout)
        return self.o_proj(out.flatten(1))

    def _indexed(
        self, parts: IndexParts, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        """As `attend`, to what the indexer chooses if this layer selects. A lesson, if any, gets its part."""
        indexer, starts, scale, lesson = self.config.indexer, layout.starts, self.config.softmax_scale, layout.lesson
        assert indexer is not None
        chosen = choose_tokens(parts, starts, indexer.top_k) if self.selects else None
        if lesson is not None:
            rows = lesson.rows
            allowed = visible(rows, starts[rows], len(starts)) if chosen is None else chosen[rows]
            with torch.no_grad():
                masses = attention_weights(query[rows], key, allowed, scale).mean(0)
            lesson.layers.append(LayerLesson(masses, parts.scores(rows, len(starts)), allowed))
        if chosen is None:
            return attend(query, key, value, layout, scale)
        return attend_to_chosen(query, key, value, chosen, scale)

    def compressed_query(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, q_lora_rank], normalized."""
        return self.q_a_layernorm(self.q_a_proj(x))

    def queries(self, compressed: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, nope + rope], rotated."""
        config = self.config
        query = self.q_b_proj(compressed).unflatten(-1, (config.num_attention_heads, -1))
        plain, rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return torch.cat((plain, rotate(rope, cosine[:, None], sine[:, None])), dim=-1)

    def latent(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """[tokens, latent]: the normalized compressed part, then the rotated key shared by all heads."""
        config = self.config
        compressed, rope = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        return torch.cat((self.kv_a_layernorm(compressed), rotate(rope, cosine, sine)), dim=-1)

    def decode(
        self,
        x: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """One token of each sequence, x [sequences, hidden], over its cache [sequences, capacity, latent].

        Writes the token's latent at `positions` [sequences] and attends to all latents up to there, in absorbed form:
        the expansion to keys and values is applied to the query and to the result.
        """
        config = self.config
        rows = torch.arange(len(x), device=x.device)
        cache[rows, positions] = self.latent(x, cosine, sine).to(cache.dtype)
        query = self.queries(self.compressed_query(x), cosine, sine)
        plain, rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        expansion = self.kv_b_proj.weight.to(x.dtype).unflatten(0, (config.num_attention_heads, -1))
        to_key, to_value = expansion.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        absorbed = torch.cat((torch.einsum("shn,hnl->shl", plain, to_key), rope), dim=-1)
        scores = torch.einsum("shl,stl->sht", absorbed, cache).float() * config.softmax_scale
        ahead = torch.arange(cache.shape[1], device=x.device) > positions[:, None]
        weights = scores.masked_fill(ahead[:, None], float("-inf")).softmax(dim=-1).to(x.dtype)
        mixed = torch.einsum("sht,stl->shl", weights, cache[..., : config.kv_lora_rank])
        return self.o_proj(torch.einsum("shl,hvl->shv", mixed, to_value).flatten(1))
