"""From a checkpoint's directory to a model that computes."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig, read_model_config
from engine.model.formats.choice import choose_formats
from engine.model.model import Model
from engine.model.quantization import Quantization, Stored
from engine.weights.checkpoint import load_weights
from engine.weights.random_weights import fill_randomly
from engine.weights.shards import Shards, open_shards
from engine.weights.stored import PRE_SCALE, is_input_scale

# How quantized weights are kept: as they are published, or in the model's dtype.
KeptWeights = Literal["quantized", "dequantized"]


def load_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device, weights: KeptWeights = "dequantized"
) -> Model:
    """Read a checkpoint into a new model of `dtype`. Raises CheckpointError."""
    config = read_model_config(model_dir)
    with open_shards(model_dir) as shards:
        config = replace(config, quantization=settle(config.quantization, shards))
        model = Model(config, make_allocator(config, dtype, device, weights))
        load_weights(shards, list(model.parameters()), unused=_prefixes(config))
    model.finish()
    return model


def random_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device, weights: KeptWeights = "dequantized"
) -> Model:
    """The model that `config.json` describes, with weights drawn on the device. Raises CheckpointError."""
    config = read_model_config(model_dir)
    model = Model(config, make_allocator(config, dtype, device, weights))
    fill_randomly(model.parameters())
    model.finish()
    return model


def settle(quantization: Quantization, shards: Shards) -> Quantization:
    """Which scales INT4 experts have beside their weights': no configuration says so, the tensors do."""
    if quantization.experts is not Stored.INT4:
        return quantization
    return replace(
        quantization,
        static_inputs=any(is_input_scale(name) for name in shards.entries),
        pre_scaled=any(name.endswith(f".{PRE_SCALE}") for name in shards.entries),
    )


def make_allocator(config: ModelConfig, dtype: torch.dtype, device: torch.device, weights: KeptWeights) -> Allocator:
    formats = choose_formats(config.quantization, dtype, dequantize=weights == "dequantized")
    return Allocator(dtype, device, formats)


def _prefixes(config: ModelConfig) -> tuple[str, ...]:
    """How the names of tensors begin that belong to layers which are not computed."""
    return tuple(f"model.layers.{layer}." for layer in config.unused_layers)
