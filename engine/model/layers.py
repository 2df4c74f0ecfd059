"""Decoder layers."""

import torch

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.feed_forward import FeedForward
from engine.model.mla import Attention
from engine.model.moe import MixtureOfExperts
from engine.model.normalized import add_and_normalize
from engine.model.parameters import NamedParameters, whole
from kernels.norm import Delta


class DecoderLayer:
    """Attention, then a dense feed-forward layer or experts, each behind a norm and added to the residual."""

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator) -> None:
        self.epsilon = config.rms_norm_eps
        self.input_norm = allocate(config.hidden_size)
        self.attention = Attention(config, index, allocate)
        self.middle_norm = allocate(config.hidden_size)
        self.feed_forward: FeedForward | MixtureOfExperts
        if config.is_dense(index):
            self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, allocate)
        else:
            self.feed_forward = MixtureOfExperts(config, allocate)

    def parameters(self, prefix: str) -> NamedParameters:
        yield whole(f"{prefix}.input_layernorm.weight", self.input_norm)
        yield from self.attention.parameters(f"{prefix}.self_attn")
        yield whole(f"{prefix}.post_attention_layernorm.weight", self.middle_norm)
        yield from self.feed_forward.parameters(f"{prefix}.mlp")

    def forward(self, delta: Delta, residual: torch.Tensor, context: ForwardContext) -> Delta:
        """Adds the layer before's `delta` to `residual` in place; returns this one's. Both [tokens, hidden]."""
        hidden = add_and_normalize(delta, residual, self.input_norm, self.epsilon, self.attention.input_forms)
        attended = self.attention.forward(hidden, context)
        hidden = add_and_normalize(attended, residual, self.middle_norm, self.epsilon, self.feed_forward.input_forms)
        return self.feed_forward.forward(hidden, context.workspace)
