"""One rank of a published model: the shapes that one GPU of an expert-parallel group computes, with random weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from capacity.shapes import EXPERTS, SHAPES
from engine.exchange.interface import RankExchange
from engine.model.activations import Normalized
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.gate import Gate
from engine.model.model import Model
from engine.model.moe import MixtureOfExperts
from engine.settings.device import ResolvedEngineConfig
from engine.weights.loading import make_allocator, make_model

# The engine's names of number formats, by short names. "auto" means bfloat16 here.
DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "auto", "fp8": "float8_e4m3fn"})


def write_shape(directory: Path, shape: str, layers: int, experts: str = "fp8", mtp_modules: int = 0) -> Path:
    """Write a model directory that has only a configuration."""
    changes = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": mtp_modules,
        "quantization_config": EXPERTS[experts],
    }
    (directory / "config.json").write_text(json.dumps(dict(SHAPES[shape]) | changes), encoding="utf-8")
    return directory


@dataclass(frozen=True)
class MeasuredModel:
    """This many layers of a shape, with random weights."""

    shape: str
    layers: int
    # As in `EXPERTS`.
    experts: str
    # The number formats of KV and of prompts' attention: "bf16" or "fp8".
    kv: str = "bf16"
    prompts: str = "bf16"
    # `engine.query_weights`: how queries' projections in bfloat16 are multiplied.
    query_weights: str = "published"

    @property
    def title(self) -> str:
        return f"{self.layers} layers of {self.shape}, {self.experts} experts"

    def settings(self, directory: Path, mtp_modules: int = 0) -> dict[str, Any]:
        """The fields of EngineConfig for this model. Writes the model's configuration to the directory."""
        return {
            "model_dir": write_shape(directory, self.shape, self.layers, self.experts, mtp_modules),
            "random_weights": True,
            "kv_dtype": DTYPES[self.kv],
            "prompt_attention_dtype": DTYPES[self.prompts],
            "query_weights": self.query_weights,
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
    """Sends each token to experts drawn at random, newly in every step. A gate with random weights would leave many
    experts without tokens.
    """

    def __init__(self, config: ModelConfig, allocate: Allocator, layer: int, uniform: UniformLogits) -> None:
        apart = allocate.formats.shared_apart or allocate.expert_group.divides
        shared = 0 if apart else config.n_shared_experts
        super().__init__(config, allocate, shared)
        self._layer = layer
        self._uniform = uniform

    def bias(self, rows: torch.Tensor) -> torch.Tensor:
        # The weight is zero, so the bias alone chooses.
        return self._uniform.of_layer(self._layer, rows.new_empty(len(rows), len(self.weight), dtype=torch.float32))

    def logits(self, hidden: Normalized) -> torch.Tensor:
        return self._uniform.of_layer(self._layer, super().logits(hidden))


def make_rank(
    resolved: ResolvedEngineConfig,
    exchange: RankExchange | None = None,
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
