"""Decoder layers."""

from functools import partial

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.feed_forward import FeedForward
from engine.model.mla import Attention
from engine.model.moe import MixtureOfExperts
from engine.model.parameters import NamedParameters, whole
from engine.model.residual import Residual
from kernels.norm import Delta


class DecoderLayer:
    """Attention, then a dense feed-forward layer or experts. A norm precedes each; its output is added to the residual.

    Attention and dense layers see all rows of the ranks of a TP group; experts see those of which this rank has the
    residual.
    """

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator) -> None:
        self.input_norm = allocate(config.hidden_size)
        self.attention = Attention(config, index, allocate, indexed=config.has_indexer(index))
        self.middle_norm = allocate(config.hidden_size)
        self.feed_forward: FeedForward | MixtureOfExperts
        if config.is_dense(index):
            self.feed_forward = FeedForward(
                config.hidden_size, config.intermediate_size, allocate, allocate.group.share
            )
        else:
            self.feed_forward = MixtureOfExperts(config, index, allocate)
        moves = isinstance(self.feed_forward, MixtureOfExperts) and self.feed_forward.slots is not None
        # Layers of the same kind launch the same kernels.
        self.kind = config.is_dense(index), config.has_indexer(index), moves

    def parameters(self, prefix: str) -> NamedParameters:
        yield whole(f"{prefix}.input_layernorm.weight", self.input_norm)
        yield from self.attention.parameters(f"{prefix}.self_attn")
        yield whole(f"{prefix}.post_attention_layernorm.weight", self.middle_norm)
        yield from self.feed_forward.parameters(f"{prefix}.mlp")

    def finish(self) -> None:
        """Called once, when all parameters are filled and before the first `forward`."""
        self.attention.finish()
        self.feed_forward.finish()

    def forward(self, delta: Delta, residual: Residual, context: ForwardContext) -> Delta:
        """Adds the previous layer's `delta` to the residual; returns this layer's."""
        hidden = residual.add(delta, self.input_norm, self.attention.input_forms, self.attention.input_weight)
        attended = self.attention.forward(hidden, context)
        forms = self.feed_forward.input_forms
        if isinstance(self.feed_forward, MixtureOfExperts):
            choose = partial(self.feed_forward.choose_at_once, counted=context.counted)
            if (listed := residual.add_and_choose(attended, self.middle_norm, choose)) is not None:
                return self.feed_forward.forward_listed(listed)
            hidden = residual.add_for_experts(attended, self.middle_norm, forms, self.feed_forward.gate.weight)
            return self.feed_forward.forward(hidden, context.workspace, context.counted, everywhere=residual.everywhere)
        hidden = residual.add_parts(attended, self.middle_norm, forms)
        return residual.delta(self.feed_forward.forward(hidden, context.workspace))
