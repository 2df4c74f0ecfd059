"""One rank of a published model: the shapes that one GPU of an expert-parallel group computes, with random weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from engine.config import ResolvedEngineConfig
from engine.exchange.interface import Exchange
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.gate import Gate
from engine.model.model import Model
from engine.model.moe import MixtureOfExperts
from engine.weights.loading import make_allocator
from engine.weights.making import make_model
from tools.quantization_configs import FP8_CONFIG, NVFP4_CONFIG, W4A8_CONFIG

DEEPSEEK_R1: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "eos_token_id": 1,
        "quantization_config": dict(FP8_CONFIG),
    }
)
# "r1-ep8-rank" stands for one of 8 ranks. Such a rank has an eighth of the tokens, and its experts get an eighth of all
# choices. They get as many if the rank's own tokens choose among its own experts alone.
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "r1-ep8-rank": dict(DEEPSEEK_R1) | {"n_routed_experts": 32, "n_group": 1, "topk_group": 1},
        # The whole model, for ranks that divide it.
        "r1": DEEPSEEK_R1,
        # The same with one expert group: tokens choose among all experts, so that choices can follow a distribution.
        "r1-one-group": dict(DEEPSEEK_R1) | {"n_group": 1, "topk_group": 1},
    }
)


# config.json's description of the form of routed experts. All else is FP8, except with "nvfp4": then dense layers and
# shared experts are NVFP4 too, and attention is bfloat16.
EXPERTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"fp8": FP8_CONFIG, "w4a8": W4A8_CONFIG, "nvfp4": NVFP4_CONFIG}
)
# The engine's names of number formats, by short names. "auto" means bfloat16 here.
DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "auto", "fp8": "float8_e4m3fn"})


def write_shape(directory: Path, shape: str, layers: int, experts: str = "fp8", mtp_modules: int = 0) -> Path:
    """Write a model directory that has only a configuration."""
    changes = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": mtp_modules,
        "quantization_config": dict(EXPERTS[experts]),
    }
    (directory / "config.json").write_text(json.dumps(dict(SHAPES[shape]) | changes))
    return directory


@dataclass(frozen=True)
class MeasuredModel:
    """So many layers of a shape, with random weights."""

    shape: str
    layers: int
    # As in `EXPERTS`.
    experts: str
    # The number formats of KV and of prompts' attention: "bf16" or "fp8".
    kv: str = "bf16"
    prompts: str = "bf16"

    @property
    def title(self) -> str:
        return f"{self.layers} layers of DeepSeek-R1, {self.experts} experts"

    def settings(self, directory: Path, mtp_modules: int = 0) -> dict[str, Any]:
        """The fields of EngineConfig for this model. Writes the model's configuration to the directory."""
        return {
            "model_dir": write_shape(directory, self.shape, self.layers, self.experts, mtp_modules),
            "random_weights": True,
            "kv_dtype": DTYPES[self.kv],
            "prompt_attention_dtype": DTYPES[self.prompts],
        }


class UniformLogits:
    """Random logits for the gates of all layers. The first layer of a step draws them for all at once: a kernel in each
    layer would count as time of the model.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        # By shape of one layer's logits: [layers, *shape].
        self._drawn: dict[torch.Size, torch.Tensor] = {}

    def of_layer(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """like: the gate's own, float32. Layers ask in order, from 0."""
        if layer == 0:
            self._drawn[like.shape] = self._draw(like)
        return self._drawn[like.shape][layer]

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(self._layers, *like.shape, device=like.device)


class UniformGate(Gate):
    """Sends each token to experts drawn at random, anew in every step. A gate with random weights would leave many
    experts without tokens.
    """

    def __init__(self, config: ModelConfig, allocate: Allocator, layer: int, uniform: UniformLogits) -> None:
        apart = allocate.formats.shared_apart or allocate.expert_group.divides
        shared = 0 if apart else config.n_shared_experts
        super().__init__(config, allocate, shared)
        self._layer = layer
        self._uniform = uniform

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._uniform.of_layer(self._layer, super().logits(hidden))


def make_rank(
    resolved: ResolvedEngineConfig,
    exchange: Exchange | None = None,
    logits: Callable[[int], UniformLogits] = UniformLogits,
) -> Model:
    """Make one rank's model. exchange: that with the other ranks if the model is divided; logits: makes the logits of
    the given number of gates.
    """
    model = make_model(resolved, exchange)
    allocate = make_allocator(model.config, model.dtype, model.device, resolved.weights, exchange)
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MixtureOfExperts)]
    drawn = logits(len(mixtures))
    for index, mixture in enumerate(mixtures):
        _route_uniformly(mixture, UniformGate(model.config, allocate, index, drawn))
    for module in model.mtp:
        if isinstance(module.layer.feed_forward, MixtureOfExperts):
            # A module runs several times a step, for different numbers of tokens, and therefore has logits of its own.
            _route_uniformly(module.layer.feed_forward, UniformGate(model.config, allocate, 0, UniformLogits(1)))
    return model


def _route_uniformly(mixture: MixtureOfExperts, gate: UniformGate) -> None:
    mixture.gate = gate
    for parameter in gate.parameters(""):
        parameter.place.zero_()
