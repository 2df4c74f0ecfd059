"""From a checkpoint's directory to a model that computes."""

from pathlib import Path
from typing import Literal

import torch

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig, read_model_config
from engine.model.formats.choice import choose_formats
from engine.model.model import Model
from engine.weights.checkpoint import load_weights
from engine.weights.random_weights import fill_randomly
from engine.weights.shards import open_shards

# How quantized weights are kept: as they are published, or in the model's dtype.
KeptWeights = Literal["quantized", "dequantized"]


def load_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device, weights: KeptWeights = "dequantized"
) -> Model:
    """Read a checkpoint into a new model of `dtype`. Raises CheckpointError."""
    config = read_model_config(model_dir)
    model = Model(config, make_allocator(config, dtype, device, weights))
    with open_shards(model_dir) as shards:
        load_weights(shards, list(model.parameters()), unused=_prefixes(config))
    return model


def random_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device, weights: KeptWeights = "dequantized"
) -> Model:
    """The model that `config.json` describes, with weights drawn on the device. Raises CheckpointError."""
    config = read_model_config(model_dir)
    model = Model(config, make_allocator(config, dtype, device, weights))
    fill_randomly(model.parameters())
    return model


def make_allocator(config: ModelConfig, dtype: torch.dtype, device: torch.device, weights: KeptWeights) -> Allocator:
    formats = choose_formats(config.quantization, dtype, dequantize=weights == "dequantized")
    return Allocator(dtype, device, formats)


def _prefixes(config: ModelConfig) -> tuple[str, ...]:
    """How the names of tensors begin that belong to layers which are not computed."""
    return tuple(f"model.layers.{layer}." for layer in config.unused_layers)
