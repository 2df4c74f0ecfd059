"""Prompts whose queries attend to selected tokens in the expanded form: to all keys, of which a mask hides the others.

A query of DeepSeek-V3.2's attends to 2,048 latents, which takes as long as some 7,000 expanded keys.
"""

from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.model.expanded_attention import ExpandedRows
from engine.model.indexed_rows import IndexedRows
from kernels.mla_prefill import takes_masks


@dataclass(slots=True)
class MaskedRows:
    """A row, of which at least the last tokens select what they attend to."""

    row: ExpandedRows
    # Those tokens, in parts whose scores are computed at a time.
    parts: tuple[IndexedRows, ...]
    # The keys that the queries attend to, as `mla_prefill` takes it: all that they see, but for those tokens what the
    # last layer with an indexer of its own has selected. Layers write and read it.
    mask: torch.Tensor

    @property
    def first(self) -> int:
        return self.row.first


def masked_until(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """The position from which on a query's attention to selected latents takes fewer multiplications than to all
    expanded keys; 0 if nothing attends to these with a mask. dtype: of hidden states.
    """
    widths = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if config.indexer is None or not takes_masks(*widths, dtype, device):
        return 0
    return selection_in_expanded_keys(config)


def selection_in_expanded_keys(config: ModelConfig) -> int:
    """To how many expanded keys a query attends with as many multiplications as to the latents that it selects."""
    assert config.indexer is not None
    absorbed = (config.latent_dim + config.kv_lora_rank) * config.indexer.top_k
    return absorbed // (config.qk_head_dim + config.v_head_dim)


def masked_is_cheaper(config: ModelConfig, *, queries: int, context: int) -> bool:
    """Whether `queries` tokens, the last of `context`, take fewer multiplications in all with a mask.

    Per head, expanded keys cost the projection for every token of the context, absorbed queries and the values of what
    they attended to only for every query.
    """
    assert config.indexer is not None
    projection = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    expanded = (config.qk_head_dim + config.v_head_dim) * (2 * context - queries) // 2
    absorbed = (config.latent_dim + config.kv_lora_rank) * config.indexer.top_k
    return queries * (absorbed - expanded) > projection * (context - queries)
