"""The tensors of a random DeepSeek V3 checkpoint: names and shapes as published, and values whose outputs vary."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.indexer_config import IndexerConfig

Values = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to write: its name, its shape, and how its float32 values are drawn."""

    name: str
    shape: tuple[int, ...]
    values: Values
    # Whether this is a linear weight that DeepSeek publishes as FP8 blocks.
    quantizable: bool = False
    # Whether it is stored in float32 even if the checkpoint's dtype is another.
    full_precision: bool = False

    def draw(self, seed: int) -> torch.Tensor:
        """float32 values that depend on the seed and the name only, not on the order of drawing."""
        digest = hashlib.blake2b(f"{seed}/{self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return self.values(self.shape, generator)


def normal(deviation: float, mean: float = 0.0) -> Values:
    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * deviation + mean

    return draw


def output_head(readable: range, eos: int) -> Values:
    """Logits with a standard deviation of 3 for readable tokens and the end of sequence, and of 0.3 for all others.

    Greedy text is therefore printable, its best two tokens differ clearly, and it ends now and then.
    """

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        deviation = torch.full((shape[0], 1), 0.3)
        deviation[readable.start : readable.stop] = 3.0
        deviation[eos] = 3.0
        return torch.randn(shape, generator=generator) * deviation * shape[1] ** -0.5

    return draw


def checkpoint_tensors(
    config: Mapping[str, Any], readable: range, indexer: IndexerConfig | None = None
) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint that `config` (as in config.json) describes, MTP modules included. indexer: None
    if it has none.
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    head = output_head(readable, config["eos_token_id"])
    yield TensorSpec("model.embed_tokens.weight", (vocabulary, hidden), normal(1.0))
    for layer in range(config["num_hidden_layers"]):
        dense = layer < config["first_k_dense_replace"]
        yield from _layer(config, layer, None if indexer and layer in indexer.sharing else indexer, dense=dense)
    yield _norm("model.norm", hidden)
    yield TensorSpec("lm_head.weight", (vocabulary, hidden), head)
    for module in range(config["num_nextn_predict_layers"]):
        layer = config["num_hidden_layers"] + module
        prefix = f"model.layers.{layer}"
        yield TensorSpec(f"{prefix}.embed_tokens.weight", (vocabulary, hidden), normal(1.0))
        yield _norm(f"{prefix}.enorm", hidden)
        yield _norm(f"{prefix}.hnorm", hidden)
        yield TensorSpec(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden), normal((2 * hidden) ** -0.5))
        yield from _layer(config, layer, indexer, dense=False)
        yield _norm(f"{prefix}.shared_head.norm", hidden)
        yield TensorSpec(f"{prefix}.shared_head.head.weight", (vocabulary, hidden), head)


def _norm(prefix: str, width: int) -> TensorSpec:
    return TensorSpec(f"{prefix}.weight", (width,), normal(0.1, mean=1.0))


def _linear(prefix: str, rows: int, columns: int, gain: float = 1.0) -> TensorSpec:
    return TensorSpec(f"{prefix}.weight", (rows, columns), normal(gain * columns**-0.5), quantizable=True)


def _layer(
    config: Mapping[str, Any], layer: int, indexer: IndexerConfig | None, *, dense: bool
) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}"
    hidden = config["hidden_size"]
    yield _norm(f"{prefix}.input_layernorm", hidden)
    yield from _attention(config, f"{prefix}.self_attn")
    if indexer is not None:
        yield from _indexer(config, indexer, f"{prefix}.self_attn.indexer")
    yield _norm(f"{prefix}.post_attention_layernorm", hidden)
    if dense:
        yield from _feed_forward(f"{prefix}.mlp", hidden, config["intermediate_size"])
    else:
        yield from _experts(config, f"{prefix}.mlp")


def _attention(config: Mapping[str, Any], prefix: str) -> Iterator[TensorSpec]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    latent = config["kv_lora_rank"]
    if config["q_lora_rank"] is None:
        yield _linear(f"{prefix}.q_proj", query, hidden)
    else:
        yield _linear(f"{prefix}.q_a_proj", config["q_lora_rank"], hidden)
        yield _norm(f"{prefix}.q_a_layernorm", config["q_lora_rank"])
        yield _linear(f"{prefix}.q_b_proj", query, config["q_lora_rank"])
    yield _linear(f"{prefix}.kv_a_proj_with_mqa", latent + config["qk_rope_head_dim"], hidden)
    yield _norm(f"{prefix}.kv_a_layernorm", latent)
    yield _linear(f"{prefix}.kv_b_proj", heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), latent)
    yield _linear(f"{prefix}.o_proj", hidden, heads * config["v_head_dim"])


def _indexer(config: Mapping[str, Any], indexer: IndexerConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, width = config["hidden_size"], indexer.width
    yield _linear(f"{prefix}.wq_b", indexer.heads * width, config["q_lora_rank"])
    yield _linear(f"{prefix}.wk", width, hidden)
    yield _norm(f"{prefix}.k_norm", width)
    yield TensorSpec(f"{prefix}.k_norm.bias", (width,), normal(0.1))
    yield TensorSpec(f"{prefix}.weights_proj.weight", (indexer.heads, hidden), normal(hidden**-0.5))


def _feed_forward(prefix: str, hidden: int, intermediate: int) -> Iterator[TensorSpec]:
    yield _linear(f"{prefix}.gate_proj", intermediate, hidden)
    yield _linear(f"{prefix}.up_proj", intermediate, hidden)
    yield _linear(f"{prefix}.down_proj", hidden, intermediate, gain=2.0)


def _experts(config: Mapping[str, Any], prefix: str) -> Iterator[TensorSpec]:
    hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["n_routed_experts"]
    yield TensorSpec(f"{prefix}.gate.weight", (experts, hidden), normal(hidden**-0.5))
    if config["topk_method"] == "noaux_tc":
        yield TensorSpec(f"{prefix}.gate.e_score_correction_bias", (experts,), normal(0.1), full_precision=True)
    for expert in range(experts):
        yield from _feed_forward(f"{prefix}.experts.{expert}", hidden, intermediate)
    yield from _feed_forward(f"{prefix}.shared_experts", hidden, intermediate * config["n_shared_experts"])
