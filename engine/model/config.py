"""A model's dimensions, read from config.json in any of the forms that the family publishes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.model.checkpoint_dir import check_directory
from engine.model.indexer_config import IndexerConfig, read_indexer
from engine.model.json_reader import JsonReader, read_json
from engine.model.quantization import Quantization, parse_quantization, read_quantization_files
from engine.model.yarn import Yarn, read_rope
from mesh.domain.architectures import find_architecture, language_model_config
from mesh.errors import CheckpointError

# How gates score experts, and how they choose among scores (DeepSeek-V2, 2024, section 2.2.2; V3, 2024, section 2.1.2).
GATES = frozenset({("sigmoid", "noaux_tc"), ("softmax", "greedy"), ("softmax", "group_limited_greedy")})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Names are those of config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    # MTP modules; their weights follow the last layer's as layers of their own.
    num_nextn_predict_layers: int
    num_attention_heads: int
    # None if queries are projected directly.
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    # One of GATES.
    scoring_func: str
    topk_method: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    yarn: Yarn | None
    eos_token_ids: frozenset[int]
    quantization: Quantization
    # None if attention is to all tokens.
    indexer: IndexerConfig | None = field(default=None, kw_only=True)
    # The quantization of MTP modules, if it differs.
    draft_quantization: Quantization | None = field(default=None, kw_only=True)
    # How many MTP modules are computed.
    draft_layers: int = 0
    # Whether the checkpoint has gates in float32; its tensors decide.
    float32_gates: bool = False
    # Whether the checkpoint's weights of indexers' heads are in float32; its tensors decide.
    float32_index_weights: bool = False

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values kept per token and layer: the compressed latent and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_layers(self) -> int:
        """Layers that write KV: those that are computed."""
        return self.num_hidden_layers + self.draft_layers

    def kv_token_bytes(self, item_bytes: int, index_item_bytes: int = 1) -> int:
        """Bytes of a token's KV in all layers, with `item_bytes` for each value of a latent and `index_item_bytes` for
        each of an index key: one on a GPU.
        """
        latent = self.latent_dim * item_bytes
        return self.kv_layers * (latent + (self.indexer.key_bytes(index_item_bytes) if self.indexer else 0))

    @property
    def unused_layers(self) -> range:
        """Layers of the checkpoint that are not computed."""
        return range(self.kv_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def softmax_scale(self) -> float:
        scale = self.qk_head_dim**-0.5
        return scale * self.yarn.softmax_scale if self.yarn else scale

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer has an indexer of its own; MTP modules of models with indexers always have."""
        return self.indexer is not None and layer not in self.indexer.sharing

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one feed-forward instead of experts; MTP modules always have experts."""
        return layer < min(self.first_k_dense_replace, self.num_hidden_layers)


def read_model_config(model_dir: Path) -> ModelConfig:
    """Parse `config.json` (and `generation_config.json`, whose end-of-sequence ids win; and TensorRT-LLM's files, if
    `config.json` does not say how weights are quantized).

    Raises CheckpointError if it is missing, unreadable or describes another architecture.
    """
    check_directory(model_dir)
    values = read_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    with _naming(model_dir / "config.json"):
        config = parse_model_config(values)
    if eos is not None:
        with _naming(generation):
            config = replace(config, eos_token_ids=_token_ids(eos))
    if config.quantization.quantized:
        return config
    return replace(config, quantization=read_quantization_files(model_dir))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Begin the message of a CheckpointError with the file that it speaks of."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.message}") from error


def parse_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Settle the forms that DeepSeek, transformers 4 and transformers 5 write; refuse what is not computed here.

    Raises CheckpointError naming the key.
    """
    values = language_model_config(values)
    architecture = find_architecture(values)
    values = {**architecture.defaults, **_without_nulls(values)}
    _check_variants(values)
    reader = JsonReader(values)
    theta, yarn = read_rope(reader)
    scoring, method = _gate(values)
    config = ModelConfig(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        num_hidden_layers=reader.positive("num_hidden_layers"),
        num_nextn_predict_layers=reader.count("num_nextn_predict_layers", reader.count("num_mtp_layers", 0)),
        num_attention_heads=reader.positive("num_attention_heads"),
        q_lora_rank=reader.positive("q_lora_rank") if "q_lora_rank" in values else None,
        kv_lora_rank=reader.positive("kv_lora_rank"),
        qk_nope_head_dim=reader.positive("qk_nope_head_dim"),
        qk_rope_head_dim=reader.positive("qk_rope_head_dim"),
        v_head_dim=reader.positive("v_head_dim"),
        intermediate_size=reader.positive("intermediate_size"),
        moe_intermediate_size=reader.positive("moe_intermediate_size"),
        first_k_dense_replace=_dense_layers(values, reader),
        n_routed_experts=reader.positive("n_routed_experts"),
        n_shared_experts=reader.positive("n_shared_experts"),
        num_experts_per_tok=reader.positive("num_experts_per_tok"),
        scoring_func=scoring,
        topk_method=method,
        # Plain greedy choice takes no notice of groups.
        n_group=reader.positive("n_group", 1) if method != "greedy" else 1,
        topk_group=reader.positive("topk_group", 1) if method != "greedy" else 1,
        norm_topk_prob=bool(values.get("norm_topk_prob", True)),
        routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position_embeddings=reader.positive("max_position_embeddings"),
        rope_theta=theta,
        yarn=yarn,
        eos_token_ids=_token_ids(values.get("eos_token_id")),
        quantization=parse_quantization(reader.section("quantization_config")),
        indexer=read_indexer(values, expected=architecture.indexed),
    )
    _check_dimensions(config)
    return config


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """A key that is null says no more than one that is left out."""
    return {key: value for key, value in values.items() if value is not None}


def _gate(values: Mapping[str, Any]) -> tuple[str, str]:
    scoring, method = str(values.get("scoring_func", "sigmoid")), str(values.get("topk_method", "noaux_tc"))
    if (scoring, method) not in GATES:
        known = " or ".join(f"{score} with {choice}" for score, choice in sorted(GATES))
        raise CheckpointError(f"scoring_func {scoring!r} with topk_method {method!r} is not supported: only {known}")
    if scoring == "softmax" and values.get("norm_topk_prob"):
        raise CheckpointError("norm_topk_prob is true: with scoring_func 'softmax' only false is supported")
    return scoring, method


def _dense_layers(values: Mapping[str, Any], reader: JsonReader) -> int:
    """How many layers have one feed-forward instead of experts. GLM lists what each layer has."""
    kinds = values.get("mlp_layer_types")
    if kinds is None:
        return reader.count("first_k_dense_replace", 0)
    listed = kinds if isinstance(kinds, list) else []
    dense = listed.index("sparse") if "sparse" in listed else len(listed)
    if kinds != ["dense"] * dense + ["sparse"] * (len(listed) - dense):
        raise CheckpointError(f"mlp_layer_types {kinds} is not supported: expected dense layers and then sparse ones")
    return dense


def _check_variants(values: Mapping[str, Any]) -> None:
    served = {
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1,
        "tie_word_embeddings": False,
        "rope_interleave": True,
    }
    for key, expected in served.items():
        if values.get(key, expected) != expected:
            raise CheckpointError(f"{key} is {values[key]!r}: only {expected!r} is supported")


def _token_ids(value: object) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"eos_token_id is {value!r}: expected a token id or a list of them")
    return frozenset(ids)


def _check_dimensions(config: ModelConfig) -> None:
    if config.n_routed_experts % config.n_group:
        raise CheckpointError(f"n_routed_experts {config.n_routed_experts} do not divide into n_group {config.n_group}")
    if config.topk_group > config.n_group:
        raise CheckpointError(f"topk_group {config.topk_group} exceeds n_group {config.n_group}")
    chosen, eligible = config.num_experts_per_tok, config.n_routed_experts // config.n_group * config.topk_group
    if chosen > eligible:
        raise CheckpointError(f"num_experts_per_tok {chosen} exceeds the {eligible} experts of topk_group groups")
    for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        # Rotated pairs are read as complex numbers, which lie at even offsets.
        if (getattr(config, key) or 0) % 2:
            raise CheckpointError(f"{key} {getattr(config, key)} is odd")
