"""DeepSeek V3: tokens in, logits out."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise

import torch

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.expert_slots import BalancedLayer, ExpertSlots
from engine.model.layers import DecoderLayer
from engine.model.moe import MixtureOfExperts
from engine.model.mtp import MtpModule
from engine.model.parameters import NamedParameters, Part, cut, whole
from engine.model.residual import Residual, begin_residual, residual_rows
from kernels.embedding import embed
from kernels.linear import linear
from kernels.norm import Delta
from kernels.rope import frequencies, rotation_table, yarn_frequencies

OnLayers = Callable[[int], None]


class Model:
    """Uninitialised until `engine.weights.checkpoint.load_weights` fills its parts."""

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
        # None if no experts lie in host memory.
        self.offloaded = allocate.offloaded
        self.norm = allocate(config.hidden_size)
        self.head = allocate(own_tokens, config.hidden_size)
        self.mtp = [
            MtpModule(config, index, allocate.of_drafts())
            for index in range(config.num_hidden_layers, config.kv_layers)
        ]

    def parameters(self) -> NamedParameters:
        return (parameter for part in self.parts() for parameter in part.parameters)

    def parts(self) -> Iterator[Part]:
        """Parts in the order in which they are to be filled and finished, once, before the first `forward`."""
        share = self.group.share
        embedding = cut([whole("model.embed_tokens.weight", self.embedding)], 0, share)
        yield Part(list(embedding))
        for index, layer in enumerate(self.layers):
            yield Part(list(layer.parameters(f"model.layers.{index}")), layer.finish)
        head = cut([whole("lm_head.weight", self.head)], 0, share)
        yield Part([whole("model.norm.weight", self.norm), *head])
        for index, module in enumerate(self.mtp, start=len(self.layers)):
            yield Part(list(module.parameters(f"model.layers.{index}")), module.layer.finish)

    def short(self) -> "Model":
        """The same over few of its layers: it launches the same kernels and takes the same memory in little time, and
        gives other tokens. It is the whole model if experts lie in host memory, whose copies follow all layers.
        """
        short = copy(self)
        if self.offloaded is None:
            short.layers = [self.layers[index] for index in one_of_each([layer.kind for layer in self.layers])]
        return short

    def derived_bytes(self) -> int:
        """Bytes of what it computes from its parameters once they are filled, and keeps in addition to them."""
        drafting = [module.layer for module in self.mtp]
        return sum(layer.attention.derived_bytes for layer in (*self.layers, *drafting))

    def balanced_layers(self) -> dict[int, BalancedLayer]:
        """By index, the layers whose experts may move between ranks."""
        return {index: BalancedLayer(slots, mixture.experts.weights()) for index, mixture, slots in self._balanced()}

    def forward(self, context: ForwardContext, on_layers: OnLayers | None = None) -> torch.Tensor:
        """Write the KV of every token; return logits [rows, vocabulary] of the tokens in `sampled`.

        `on_layers` is called with n when n layers are computed, or on a GPU enqueued.
        """
        return self.logits(self.hidden_states(context, on_layers, context.sampled))

    def hidden_states(
        self, context: ForwardContext, on_layers: OnLayers | None = None, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the KV of every token; return the hidden states after the last norm, [tokens, hidden].

        tokens: those whose states are returned, [rows] int64; None for all. on_layers: as of `forward`.
        """
        if self.offloaded is not None:
            self.offloaded.begin()
        embedded, residual = self._begin(context)
        context = _counting(context, residual)
        delta: Delta = residual.delta(embedded)
        for index, layer in enumerate(self.layers):
            delta = layer.forward(delta, residual, context)
            if self.offloaded is not None:
                self.offloaded.passed(index)
            if on_layers is not None:
                on_layers(index + 1)
        if self.offloaded is not None:
            self.offloaded.end()
        return residual.finish(delta, self.norm, tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] from hidden states after the last norm: [rows, hidden]."""
        return self.group.join_columns(linear(hidden, self.head))

    def draft(self, module: int, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Write the KV of a module's layer; return the hidden states whose logits guess tokens, [tokens, hidden].

        hidden: [tokens, hidden] of the tokens before those in `context`, which follow them: of the first module from
        `hidden_states`, of others from the module before; or from the module itself, which is then run once more.
        """
        embedded, residual = self._begin(context)
        embedded = self.group.sum_everywhere(embedded)
        return self.mtp[module].forward(embedded, hidden, residual, _counting(context, residual))

    def _balanced(self) -> Iterator[tuple[int, MixtureOfExperts, ExpertSlots]]:
        for index, layer in enumerate(self.layers):
            mixture = layer.feed_forward
            if isinstance(mixture, MixtureOfExperts) and mixture.slots is not None:
                yield index, mixture, mixture.slots

    def _begin(self, context: ForwardContext) -> tuple[torch.Tensor, Residual]:
        """This rank's part of the embeddings, [tokens, hidden], and the residual."""
        tokens, epsilon = len(context.token_ids), self.config.rms_norm_eps
        # Rows that all ranks have do not travel to experts, and parts of a step would have nothing to take turns for.
        divided = self.expert_group.turns.taken
        rows = residual_rows(tokens, self.group, divided=divided)
        embedded, zeros = embed(context.token_ids, self.embedding, self._tokens.start, rows)
        return embedded, begin_residual(zeros, tokens, epsilon, self.group, divided=divided)


def one_of_each(kinds: Sequence[Hashable]) -> list[int]:
    """Ascending indices of the fewest layers in which each kind follows each kind that it follows in the model, and of
    the last layer.
    """
    pairs = list(pairwise((None, *kinds)))
    first = {pair: index for index, pair in reversed(list(enumerate(pairs)))}
    return sorted({max(index - before, 0) for index in first.values() for before in (0, 1)} | {len(kinds) - 1})


def _counting(context: ForwardContext, residual: Residual) -> ForwardContext:
    return replace(context, counted=residual.own(context.real.unsqueeze(1)).squeeze(1))


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
        truncate=yarn.truncate,
    )
    return rotation_table(radians.to(device), positions, yarn.rotation_scale)
