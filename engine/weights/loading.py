"""From a checkpoint's directory to a model that computes."""

import dataclasses
import logging
from pathlib import Path

import torch

from engine.model.config import ModelConfig, read_model_config
from engine.model.model import Model
from engine.weights.checkpoint import load_weights
from engine.weights.random_weights import fill_randomly
from engine.weights.shards import Shards, open_shards

_log = logging.getLogger("deepmesh.engine")


def load_model(model_dir: Path, dtype: torch.dtype, device: torch.device, *, keep_fp8: bool = False) -> Model:
    """Read a checkpoint into a new model of `dtype`; its FP8 weights stay so if `keep_fp8`. Raises CheckpointError."""
    config = read_model_config(model_dir)
    with open_shards(model_dir) as shards:
        config = _without_absent_modules(config, shards)
        model = Model(config, dtype=dtype, device=device, fp8=keep_fp8 and config.fp8)
        load_weights(shards, dict(model.parameters()))
    return model


def random_model(model_dir: Path, dtype: torch.dtype, device: torch.device, *, keep_fp8: bool = False) -> Model:
    """The model that `config.json` describes, with weights drawn on the device. Raises CheckpointError."""
    config = read_model_config(model_dir)
    model = Model(config, dtype=dtype, device=device, fp8=keep_fp8 and config.fp8)
    fill_randomly(dict(model.parameters()))
    return model


def _without_absent_modules(config: ModelConfig, shards: Shards) -> ModelConfig:
    """Tools that drop the MTP modules' weights leave their number in config.json: believe the weights."""
    present = 0
    while any(name.startswith(f"model.layers.{config.num_hidden_layers + present}.") for name in shards.entries):
        present += 1
    if present >= config.num_nextn_predict_layers:
        return config
    _log.info("the checkpoint holds %d of %d MTP modules", present, config.num_nextn_predict_layers)
    return dataclasses.replace(config, num_nextn_predict_layers=present)
