"""The namespace of a model's KV: workers with the same one may share KV."""

from pathlib import Path

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.settings.device import ResolvedEngineConfig
from engine.weights.fingerprint import weights_fingerprint
from mesh.domain.kv_identity import KvNamespace


def kv_namespace(model: ModelConfig, resolved: ResolvedEngineConfig, kv_scale: float) -> KvNamespace:
    assert resolved.config.model_dir is not None
    return KvNamespace(
        weights_fingerprint=_kv_meaning(resolved.config, resolved.config.model_dir),
        dtype=resolved.kv_dtype,
        layers=model.kv_layers,
        layout=_layout(model, resolved),
        scale=kv_scale,
        draft_layers=model.draft_layers,
    )


def _layout(model: ModelConfig, resolved: ResolvedEngineConfig) -> str:
    latents = f"latent {model.kv_lora_rank}, interleaved rope {model.qk_rope_head_dim}"
    return f"{latents}, index keys {model.indexer.width} {resolved.index_dtype}" if model.indexer else latents


# How products are rounded (engine.dtype, weights, query_weights, prompt_attention_dtype) is no part of the namespace:
# KV that differs by rounding alone may be shared. KV of sparse prompts differs by more, and has hashes of its own.
def _kv_meaning(config: EngineConfig, model_dir: Path) -> str:
    """Equal for workers whose KV means the same; a declared name never equals a digest."""
    if config.kv_namespace is not None:
        return f"declared: {config.kv_namespace}"
    return "random" if config.random_weights else weights_fingerprint(model_dir)
