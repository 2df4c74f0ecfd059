"""Bytes that one GPU of a worker holds: weights by layer, and KV by token. Pure."""

from dataclasses import dataclass

from bench.rank.floor import BF16, ITEM_BYTES
from engine.model.config import ModelConfig
from engine.model.quantization import LinearKind, Stored


@dataclass(frozen=True)
class Weights:
    """What one of `gpus` GPUs holds: they share the routed experts; all else is on each of them."""

    # Bytes of one layer's routed experts, and how many layers have some.
    layer_experts: float
    expert_layers: int
    rest: float
    # Layers whose experts lie in host memory, and how many of these the GPU has room for at a time.
    offloaded: int = 0
    slots: int = 0

    @property
    def experts(self) -> float:
        return (self.expert_layers - self.offloaded + self.slots) * self.layer_experts

    @property
    def total(self) -> float:
        return self.experts + self.rest

    @property
    def host(self) -> float:
        """In host memory, all of which a step copies to the GPU."""
        return self.offloaded * self.layer_experts


def weights_of(config: ModelConfig, gpus: int, offloaded: int = 0, slots: int = 0) -> Weights:
    layers, hidden = config.num_hidden_layers, config.hidden_size
    dense = sum(config.is_dense(layer) for layer in range(layers))
    linear = ITEM_BYTES[config.quantization.linear_of(LinearKind.INPUT)]
    feed_forward = ITEM_BYTES[config.quantization.linear_of(LinearKind.FEED_FORWARD)]
    shared = 3 * hidden * config.moe_intermediate_size * config.n_shared_experts * feed_forward
    gate = hidden * config.n_routed_experts * BF16
    expert = 3 * hidden * config.moe_intermediate_size * ITEM_BYTES[config.quantization.experts]
    rest = (
        layers * (_attention(config) * linear + _absorbed(config))
        + dense * 3 * hidden * config.intermediate_size * feed_forward
        + (layers - dense) * (shared + gate)
        + 2 * config.vocab_size * hidden * BF16
    )
    return Weights(expert * config.n_routed_experts / gpus, layers - dense, rest, offloaded, slots)


def kv_bytes_a_token(config: ModelConfig, item_bytes: int) -> int:
    return config.num_hidden_layers * config.latent_dim * item_bytes


def _attention(config: ModelConfig) -> float:
    """Numbers in a layer's projections."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    queries = hidden if config.q_lora_rank is None else config.q_lora_rank
    compress = 0 if config.q_lora_rank is None else hidden * config.q_lora_rank
    out = heads * config.v_head_dim * hidden
    return compress + queries * heads * config.qk_head_dim + hidden * config.latent_dim + _expansion(config) + out


def _expansion(config: ModelConfig) -> int:
    """Numbers in a layer's projection from latents to keys and values."""
    return config.kv_lora_rank * config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)


def _absorbed(config: ModelConfig) -> int:
    """Bytes of that projection for the absorbed form, beside the one that is multiplied in FP8."""
    return _expansion(config) * BF16 if config.quantization.linear is Stored.FP8 else 0
