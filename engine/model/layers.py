"""Decoder layers."""

import torch

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.feed_forward import FeedForward
from engine.model.mla import Attention
from engine.model.moe import MixtureOfExperts
from engine.model.normalized import add_normalize_and_gather, sum_and_normalize, sum_normalize_and_gather
from engine.model.parameters import NamedParameters, whole
from engine.model.turns import Turns
from kernels.norm import Delta


class DecoderLayer:
    """Attention, then a dense feed-forward layer or experts, each behind a norm and added to the residual.

    Attention and dense layers see all rows of the ranks of a TP group; the residual and experts see this rank's.
    """

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator) -> None:
        self.epsilon = config.rms_norm_eps
        self._group = allocate.group
        self.input_norm = allocate(config.hidden_size)
        self.attention = Attention(config, index, allocate)
        self.middle_norm = allocate(config.hidden_size)
        self.feed_forward: FeedForward | MixtureOfExperts
        if config.is_dense(index):
            self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, allocate, self._group.share)
        else:
            self.feed_forward = MixtureOfExperts(config, index, allocate)

    def parameters(self, prefix: str) -> NamedParameters:
        yield whole(f"{prefix}.input_layernorm.weight", self.input_norm)
        yield from self.attention.parameters(f"{prefix}.self_attn")
        yield whole(f"{prefix}.post_attention_layernorm.weight", self.middle_norm)
        yield from self.feed_forward.parameters(f"{prefix}.mlp")

    def forward(self, delta: Delta, residual: torch.Tensor, context: ForwardContext) -> Turns[Delta]:
        """Adds the layer before's `delta` to `residual` in place; returns this one's. Both [own rows, hidden]."""
        tokens, group = len(context.token_ids), self._group
        forms = self.attention.input_forms
        hidden = add_normalize_and_gather(delta, residual, self.input_norm, self.epsilon, forms, group, tokens)
        attended = self.attention.forward(hidden, context)
        forms = self.feed_forward.input_forms
        if isinstance(self.feed_forward, MixtureOfExperts):
            hidden = sum_and_normalize(attended, residual, self.middle_norm, self.epsilon, forms, group)
            mixture = self.feed_forward.forward(hidden, context.workspace, context.counted, beside=context.takes_turns)
            return (yield from mixture)
        hidden = sum_normalize_and_gather(attended, residual, self.middle_norm, self.epsilon, forms, group, tokens)
        return group.sum(self.feed_forward.forward(hidden, context.workspace))
