"""The model architectures that workers compute: DeepSeek-V3's and its family, as config.json names them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mesh.errors import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """One class of models, named as in transformers, with which config.json describes them."""

    name: str
    # What config.json calls it besides.
    model_types: frozenset[str]
    # Models that publish it.
    models: str
    # What a key means that config.json leaves out, where that is not what DeepSeek-V3 means.
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # The key with the config.json of its language model, if it is a model that also sees.
    language_model: str | None = None
    # Whether its attention is to the tokens that indexers select.
    indexed: bool = False


FAMILY = (
    Architecture(
        "DeepseekV3ForCausalLM",
        frozenset({"deepseek_v3", "kimi_k2"}),
        "DeepSeek V3, V3.1 and R1, Kimi K2, Moonlight, GigaChat3, JoyAI-LLM and Kanana-2",
    ),
    Architecture(
        "DeepseekV2ForCausalLM",
        frozenset({"deepseek_v2"}),
        "DeepSeek V2, V2-Lite and Coder-V2",
        MappingProxyType({"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}),
    ),
    Architecture(
        "Glm4MoeLiteForCausalLM",
        frozenset({"glm4_moe_lite"}),
        "GLM-4.7-Flash",
        MappingProxyType({"first_k_dense_replace": 1}),
    ),
    Architecture("DeepseekV32ForCausalLM", frozenset({"deepseek_v32"}), "DeepSeek V3.2", indexed=True),
    Architecture(
        "GlmMoeDsaForCausalLM",
        frozenset({"glm_moe_dsa"}),
        "GLM-5",
        MappingProxyType({"indexer_rope_interleave": True}),
        indexed=True,
    ),
    Architecture(
        "KimiK25ForConditionalGeneration",
        frozenset({"kimi_k25"}),
        "Kimi K2.5's language model",
        language_model="text_config",
    ),
)
# Keys of a model that also sees which its language model's part may lack.
_SHARED = ("eos_token_id", "quantization_config")


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json names. Raises CheckpointError, with what is supported, if none is."""
    found = config.get("architectures") or []
    names = list(map(str, found)) if isinstance(found, list) else [str(found)]
    for architecture in FAMILY:
        if architecture.name in names or str(config.get("model_type")) in architecture.model_types:
            return architecture
    name = ", ".join(names) or config.get("model_type") or "nothing"
    served = "; ".join(f"{each.name} ({each.models})" for each in FAMILY)
    raise CheckpointError(f"unsupported architecture {name}: deepmesh serves {served}")


def language_model_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the language model: itself, or a part of it where the model also sees. Raises CheckpointError
    if the architecture is not served, or that part is missing.
    """
    architecture = find_architecture(config)
    if architecture.language_model is None:
        return config
    found = config.get(architecture.language_model)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{architecture.name} has no {architecture.language_model}: only its text is served")
    return {**{key: config[key] for key in _SHARED if key in config}, **found}
