"""From a checkpoint's directory to a model that computes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from engine.exchange.interface import Exchange
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig, read_model_config
from engine.model.formats.choice import choose_formats
from engine.model.model import Model
from engine.model.mtp import SHARED_WITH_MODEL
from engine.model.parameters import Parameter
from engine.model.quantization import Quantization, Stored
from engine.model.share import check_division, check_experts
from engine.weights.checkpoint import load_weights
from engine.weights.random_weights import fill_randomly
from engine.weights.shards import Shards, open_shards
from engine.weights.stored import PRE_SCALE, is_input_scale
from mesh.errors import CheckpointError

# What to do about a model without what drafts need.
NO_DRAFTS = "set engine.drafts.next_n=0, or serve a checkpoint that has one"
# How quantized weights are kept: as they are published, or in the model's dtype.
KeptWeights = Literal["quantized", "dequantized"]


def load_model(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights: KeptWeights = "dequantized",
    *,
    drafts: bool = False,
    exchange: Exchange | None = None,
) -> Model:
    """Read a checkpoint into a new model of `dtype`, if asked with the module that drafts.

    exchange: with the worker's other ranks, of whose model this is a share. Raises CheckpointError, and ConfigError if
    the ranks cannot divide it.
    """
    config = _with_drafts(read_model_config(model_dir), drafts)
    with open_shards(model_dir) as shards:
        _check_draft_module(config, shards)
        config = replace(config, quantization=settle(config.quantization, shards))
        model = Model(config, make_allocator(config, dtype, device, weights, exchange))
        parameters = list(model.parameters())
        # The ranks of a worker read shares of one size at one time: the first speaks for all.
        quiet = exchange is not None and exchange.place.rank > 0
        elsewhere = _on_other_ranks(parameters, model)
        load_weights(shards, parameters, unused=_prefixes(config), elsewhere=elsewhere, quiet=quiet)
    model.finish()
    return model


def random_model(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights: KeptWeights = "dequantized",
    *,
    drafts: bool = False,
    exchange: Exchange | None = None,
) -> Model:
    """The model that `config.json` describes, with weights drawn on the device. Raises CheckpointError."""
    config = _with_drafts(read_model_config(model_dir), drafts)
    model = Model(config, make_allocator(config, dtype, device, weights, exchange))
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


def make_allocator(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    weights: KeptWeights,
    exchange: Exchange | None = None,
) -> Allocator:
    """Raises ConfigError if the ranks cannot divide the model."""
    formats = choose_formats(config.quantization, dtype, dequantize=weights == "dequantized")
    allocate = Allocator(dtype, device, formats, exchange)
    quantized = weights == "quantized"
    fp8_blocks = quantized and config.quantization.linear is Stored.FP8
    check_division(config, allocate.group.share.count, fp8_blocks=fp8_blocks)
    if exchange is not None:
        blocks = quantized and config.quantization.experts is not Stored.PLAIN
        check_experts(config, exchange.place.layout, blocks=blocks)
    return allocate


def _with_drafts(config: ModelConfig, drafts: bool) -> ModelConfig:
    if drafts and not config.num_nextn_predict_layers:
        raise CheckpointError(f"config.json describes no MTP module (num_nextn_predict_layers is 0): {NO_DRAFTS}")
    return replace(config, draft_layers=int(drafts))


def _check_draft_module(config: ModelConfig, shards: Shards) -> None:
    prefix = f"model.layers.{config.num_hidden_layers}."
    if config.draft_layers and not any(name.startswith(prefix) for name in shards.entries):
        raise CheckpointError(f"the checkpoint holds no MTP module ({prefix}*): {NO_DRAFTS}")


def _prefixes(config: ModelConfig) -> tuple[str, ...]:
    """How the names of tensors begin that are not read: of layers that are not computed, and copies of shared ones."""
    drafting = range(config.num_hidden_layers, config.kv_layers)
    copies = [f"model.layers.{layer}.{name}" for layer in drafting for name in SHARED_WITH_MODEL]
    return (*copies, *(f"model.layers.{layer}." for layer in config.unused_layers))


def _on_other_ranks(parameters: Sequence[Parameter], model: Model) -> set[str]:
    """The names of routed experts' tensors that this rank does not hold: they are as those of its first expert."""
    held = model.expert_group.share.of(model.config.n_routed_experts)
    first = f".experts.{held.start}."
    others = [expert for expert in range(model.config.n_routed_experts) if not held.start <= expert < held.stop]
    names = [parameter.name for parameter in parameters if first in parameter.name]
    return {name.replace(first, f".experts.{expert}.") for name in names for expert in others}
