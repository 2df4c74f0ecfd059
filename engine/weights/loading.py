"""From a checkpoint's directory to a model that computes."""

from pathlib import Path

import torch

from engine.model.config import ModelConfig, read_model_config
from engine.model.model import Model
from engine.weights.checkpoint import load_weights
from engine.weights.random_weights import fill_randomly
from engine.weights.shards import open_shards


def load_model(model_dir: Path, dtype: torch.dtype, device: torch.device, *, keep_fp8: bool = False) -> Model:
    """Read a checkpoint into a new model of `dtype`; its FP8 weights stay so if `keep_fp8`. Raises CheckpointError."""
    config = read_model_config(model_dir)
    with open_shards(model_dir) as shards:
        model = Model(config, dtype=dtype, device=device, fp8=keep_fp8 and config.fp8)
        load_weights(shards, dict(model.parameters()), unused=_prefixes(config))
    return model


def random_model(model_dir: Path, dtype: torch.dtype, device: torch.device, *, keep_fp8: bool = False) -> Model:
    """The model that `config.json` describes, with weights drawn on the device. Raises CheckpointError."""
    config = read_model_config(model_dir)
    model = Model(config, dtype=dtype, device=device, fp8=keep_fp8 and config.fp8)
    fill_randomly(dict(model.parameters()))
    return model


def _prefixes(config: ModelConfig) -> tuple[str, ...]:
    """How the names of tensors begin that belong to layers which are not computed."""
    return tuple(f"model.layers.{layer}." for layer in config.unused_layers)
