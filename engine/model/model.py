"""DeepSeek V3: tokens in, logits out."""

from collections.abc import Callable

import torch
from torch.nn import functional

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.layers import DecoderLayer
from engine.model.mtp import MtpModule
from engine.model.parameters import NamedParameters, whole
from kernels.linear import linear
from kernels.norm import Delta, add_rms_norm
from kernels.rope import frequencies, rotation_table, yarn_frequencies


class Model:
    """Uninitialised until `engine.weights.checkpoint.load_weights` fills its parameters."""

    def __init__(self, config: ModelConfig, allocate: Allocator) -> None:
        self.config = config
        self.dtype = allocate.dtype
        self.device = allocate.device
        self.embedding = allocate(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, index, allocate) for index in range(config.num_hidden_layers)]
        self.norm = allocate(config.hidden_size)
        self.head = allocate(config.vocab_size, config.hidden_size)
        self.mtp = MtpModule(config, config.num_hidden_layers, allocate) if config.draft_layers else None

    def parameters(self) -> NamedParameters:
        yield whole("model.embed_tokens.weight", self.embedding)
        for index, layer in enumerate(self.layers):
            yield from layer.parameters(f"model.layers.{index}")
        yield whole("model.norm.weight", self.norm)
        yield whole("lm_head.weight", self.head)
        if self.mtp is not None:
            yield from self.mtp.parameters(f"model.layers.{len(self.layers)}")

    def finish(self) -> None:
        """Called once, when all parameters are filled and before the first `forward`."""
        for layer in self.layers if self.mtp is None else [*self.layers, self.mtp.layer]:
            layer.feed_forward.finish()

    def forward(self, context: ForwardContext, on_layers: Callable[[int], None] | None = None) -> torch.Tensor:
        """Write the KV of every token; return logits [rows, vocabulary] of the tokens in `context.sampled`.

        `on_layers` is called when n layers are computed, or on a GPU enqueued.
        """
        delta, residual = self._computed(context, on_layers)
        if context.sampled is not None:
            delta, residual = delta[context.sampled], residual[context.sampled]
        return self.logits(add_rms_norm(delta, residual, self.norm, self.config.rms_norm_eps))

    def hidden_states(self, context: ForwardContext, on_layers: Callable[[int], None] | None = None) -> torch.Tensor:
        """Write the KV of every token; return the hidden states of all of them after the last norm, [tokens, hidden].

        `on_layers` as in `forward`.
        """
        return add_rms_norm(*self._computed(context, on_layers), self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] from hidden states after the last norm: [rows, hidden]."""
        return linear(hidden, self.head)

    def draft(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Write the draft layer's KV; return the hidden states whose logits guess tokens, [tokens, hidden].

        hidden: [tokens, hidden] of the tokens before those in `context`, which follow them: from `hidden_states`, or
        from `draft` itself.
        """
        assert self.mtp is not None
        return self.mtp.forward(functional.embedding(context.token_ids, self.embedding), hidden, context)

    def _computed(self, context: ForwardContext, on_layers: Callable[[int], None] | None) -> tuple[Delta, torch.Tensor]:
        """All layers: what the last one adds to the residual, and that. Both [tokens, hidden]."""
        residual = torch.zeros(len(context.token_ids), self.config.hidden_size, dtype=self.dtype, device=self.device)
        delta: Delta = functional.embedding(context.token_ids, self.embedding)
        for count, layer in enumerate(self.layers, start=1):
            delta = layer.forward(delta, residual, context)
            if on_layers is not None:
                on_layers(count)
        return delta, residual


def model_rotations(config: ModelConfig, positions: int, device: torch.device) -> torch.Tensor:
    """The rotations of positions 0..positions-1: [positions, qk_rope_head_dim / 2] complex64."""
    dim, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.yarn
    if yarn is None:
        return rotation_table(frequencies(dim, theta).to(device), positions)
    radians = yarn_frequencies(
        dim,
        theta,
        factor=yarn.factor,
        original_positions=yarn.original_max_position_embeddings,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )
    return rotation_table(radians.to(device), positions, yarn.rotation_scale)
