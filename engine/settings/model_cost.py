"""What a model's tokens cost, compared with those of DeepSeek-R1, with which the settings were measured. Pure."""

from dataclasses import replace

from engine.memory.weight_bytes import BF16, weight_bytes
from engine.model.config import ModelConfig
from engine.parallel.layout import Layout

# What one H200 reaches in a copy, and in bf16 attention (docs/performance.md).
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.2e12, 600e12
# DeepSeek-R1's, by the functions below, and the bytes of a rank of eight.
R1_CONTEXT_SECONDS, R1_ACTIVE_WEIGHTS, R1_WEIGHTS = 28.3e-9, 36.6e9, 102.9e9
# Tokens of a context, as measured.
CONTEXT_TOKENS = 3500


def requests_for_one(model: ModelConfig) -> float:
    """For how many requests of this model attention takes a rank as long as for one of DeepSeek-R1."""
    return R1_CONTEXT_SECONDS / context_seconds(model)


def step_seconds(model: ModelConfig, weights: float, requests: int) -> float:
    """How long a rank with these bytes of weights takes at least for a decode step."""
    return _step_seconds(weights, context_seconds(model), requests)


def r1_step_seconds(requests: int) -> float:
    """`step_seconds` of DeepSeek-R1's rank."""
    return _step_seconds(R1_WEIGHTS, R1_CONTEXT_SECONDS, requests)


def _step_seconds(weights: float, context_seconds: float, requests: int) -> float:
    return weights / BYTES_PER_SECOND + requests * CONTEXT_TOKENS * context_seconds


def tokens_for_one(model: ModelConfig) -> float:
    """How many tokens of this model are as many FLOPs as one of DeepSeek-R1, without attention to other tokens."""
    return R1_ACTIVE_WEIGHTS / active_weights(model)


def context_seconds(model: ModelConfig) -> float:
    """How long a decode step reads or computes for each token of a request's context, in all layers."""
    heads = model.num_attention_heads * model.num_hidden_layers
    flops = 2 * heads * (model.latent_dim + model.kv_lora_rank)
    return max(model.kv_token_bytes(BF16) / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)


def active_weights(model: ModelConfig) -> float:
    """The numbers of the weights that one token multiplies with; of the vocabulary, the head alone."""
    plain = replace(model, num_nextn_predict_layers=0)
    held = weight_bytes(plain, Layout(), "dequantized")
    idle = model.n_routed_experts - model.num_experts_per_tok
    embedding = BF16 * model.vocab_size * model.hidden_size
    return (held.total - held.expert_layers * idle * held.copy - embedding) / BF16
