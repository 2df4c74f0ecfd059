"""DeepSeek V3: tokens in, logits out."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.expert_slots import BalancedLayer, ExpertSlots
from engine.model.layers import DecoderLayer
from engine.model.moe import MixtureOfExperts
from engine.model.mtp import MtpModule
from engine.model.parameters import NamedParameters, cut, whole
from kernels.linear import linear
from kernels.norm import Delta, add_rms_norm
from kernels.rope import frequencies, rotation_table, yarn_frequencies
from mesh.blocks import BLOCK_TOKENS


class Model:
    """Uninitialised until `engine.weights.checkpoint.load_weights` fills its parameters."""

    def __init__(self, config: ModelConfig, allocate: Allocator) -> None:
        self.config = config
        self.dtype = allocate.dtype
        self.device = allocate.device
        self.group = allocate.group
        self.expert_group = allocate.expert_group
        # This rank's share of the vocabulary.
        self._tokens = self.group.share.of(config.vocab_size)
        own_tokens = self.group.share.size(config.vocab_size)
        self.embedding = allocate(own_tokens, config.hidden_size)
        self.layers = [DecoderLayer(config, index, allocate) for index in range(config.num_hidden_layers)]
        self._counts = any(True for _ in self._balanced())
        self.norm = allocate(config.hidden_size)
        self.head = allocate(own_tokens, config.hidden_size)
        self.mtp = [
            MtpModule(config, index, allocate.of_drafts())
            for index in range(config.num_hidden_layers, config.kv_layers)
        ]

    def parameters(self) -> NamedParameters:
        share = self.group.share
        yield from cut([whole("model.embed_tokens.weight", self.embedding)], 0, share)
        for index, layer in enumerate(self.layers):
            yield from layer.parameters(f"model.layers.{index}")
        yield whole("model.norm.weight", self.norm)
        yield from cut([whole("lm_head.weight", self.head)], 0, share)
        for index, module in enumerate(self.mtp, start=len(self.layers)):
            yield from module.parameters(f"model.layers.{index}")

    def finish(self) -> None:
        """Called once, when all parameters are filled and before the first `forward`."""
        for layer in [*self.layers, *(module.layer for module in self.mtp)]:
            layer.attention.finish()
            layer.feed_forward.finish()

    def balanced_layers(self) -> dict[int, BalancedLayer]:
        """By index, the layers whose experts may move between ranks."""
        return {index: BalancedLayer(slots, mixture.experts.weights()) for index, mixture, slots in self._balanced()}

    def forward(self, context: ForwardContext, on_layers: Callable[[int], None] | None = None) -> torch.Tensor:
        """Write the KV of every token; return logits [rows, vocabulary] of the tokens in `context.sampled`.

        `on_layers` is called when n layers are computed, or on a GPU enqueued.
        """
        if self.group.divides:
            hidden = self.hidden_states(context, on_layers)
            return self.logits(hidden if context.sampled is None else hidden[context.sampled])
        delta, residual = self._computed(context, on_layers)
        if context.sampled is not None:
            delta, residual = delta[context.sampled], residual[context.sampled]
        return self.logits(add_rms_norm(delta, residual, self.norm, self.config.rms_norm_eps))

    def hidden_states(self, context: ForwardContext, on_layers: Callable[[int], None] | None = None) -> torch.Tensor:
        """Write the KV of every token; return the hidden states of all of them after the last norm, [tokens, hidden].

        `on_layers` as in `forward`.
        """
        own = add_rms_norm(*self._computed(context, on_layers), self.norm, self.config.rms_norm_eps)
        return self.group.gather(own, len(context.token_ids))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] from hidden states after the last norm: [rows, hidden]."""
        return self.group.join_columns(linear(hidden, self.head))

    def draft(self, module: int, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Write the KV of a module's layer; return the hidden states whose logits guess tokens, [tokens, hidden].

        hidden: [tokens, hidden] of the tokens before those in `context`, which follow them: of the first module from
        `hidden_states`, of others from the module before; or from the module itself, which is then run once more.
        """
        own = self.mtp[module].forward(self._embedded(context.token_ids), self.group.own(hidden), context)
        return self.group.gather(own, len(context.token_ids))

    def _balanced(self) -> Iterator[tuple[int, MixtureOfExperts, ExpertSlots]]:
        for index, layer in enumerate(self.layers):
            mixture = layer.feed_forward
            if isinstance(mixture, MixtureOfExperts) and mixture.slots is not None:
                yield index, mixture, mixture.slots

    def _computed(self, context: ForwardContext, on_layers: Callable[[int], None] | None) -> tuple[Delta, torch.Tensor]:
        """All layers: what the last one adds to the residual, and that. Both [own rows, hidden]."""
        if self._counts:
            padding = (context.kv_pool.shape[1] - 1) * BLOCK_TOKENS
            context = replace(context, counted=self.group.own((context.slots < padding).long().unsqueeze(1)).squeeze(1))
        delta: Delta = self._embedded(context.token_ids)
        residual = torch.zeros(delta.shape, dtype=self.dtype, device=self.device)
        for count, layer in enumerate(self.layers, start=1):
            delta = layer.forward(delta, residual, context)
            if on_layers is not None:
                on_layers(count)
        return delta, residual

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of this rank's rows: [own rows, hidden]. token_ids: [tokens] int64, of all rows."""
        if not self.group.divides:
            return functional.embedding(token_ids, self.embedding)
        foreign = (token_ids < self._tokens.start) | (token_ids >= self._tokens.stop)
        known = functional.embedding((token_ids - self._tokens.start).masked_fill(foreign, 0), self.embedding)
        return self.group.sum(known.masked_fill(foreign.unsqueeze(1), 0))


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
