"""Which layers keep their weights in which format."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.model.activations import InputForm
from engine.model.formats.at_load import ExpertsAtLoadFormat, Fp8AtLoadFormat
from engine.model.formats.block_fp8 import BlockFp8Format
from engine.model.formats.interface import WeightFormat
from engine.model.formats.nvfp4 import Nvfp4Format
from engine.model.formats.plain import PlainFormat
from engine.model.formats.w4a8 import Int4Form, W4A8Format
from engine.model.quantization import LinearKind, Quantization, Stored
from kernels.block_quant import quantize_blocks
from kernels.group_quant import quantize_groups


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of a model. A layer whose shape its format does not take is plain."""

    linear: Mapping[LinearKind, WeightFormat]
    experts: WeightFormat
    # Whether shared experts are a layer of their own, instead of the last ones of the experts' grouped products.
    shared_apart: bool
    gate_dtype: torch.dtype
    # The dtype of what tells how much an indexer's heads count.
    index_weights_dtype: torch.dtype
    # Whether keys and values are expanded from latents in FP8, with the published weight.
    fp8_expansion: bool = False
    # How activations are quantized for products with FP8 weights.
    fp8_form: InputForm = InputForm.FP8_GROUPS


def choose_formats(
    stored: Quantization,
    dtype: torch.dtype,
    *,
    dequantize: bool,
    fp8_queries: bool = False,
    float32_gates: bool = False,
    float32_index_weights: bool = False,
    at_load: Quantization | None = None,
) -> Formats:
    """Quantized weights stay as they are published, or are converted to the model's dtype if `dequantize`. fp8_queries:
    unless `dequantize`, projections of queries that are published plain are quantized when they are loaded.
    float32_gates, float32_index_weights: gates, and weights of indexers' heads, are published in float32, and stay so,
    because rounding would change their choices. at_load: how weights that are published plain, or packed, are quantized
    when they are loaded; None if they stay plain.
    """
    gate_dtype = torch.float32 if float32_gates else dtype
    index_weights_dtype = torch.float32 if float32_index_weights else dtype
    if at_load is not None and not dequantize and stored.takes_rounding:
        return Formats(
            linear=dict.fromkeys(LinearKind, Fp8AtLoadFormat()),
            experts=_experts_at_load(at_load),
            shared_apart=at_load.experts is not at_load.linear,
            gate_dtype=gate_dtype,
            index_weights_dtype=index_weights_dtype,
        )
    if dequantize or not (stored.quantized or fp8_queries):
        linear: dict[LinearKind, WeightFormat] = dict.fromkeys(LinearKind, PlainFormat())
        return Formats(
            linear, PlainFormat(), shared_apart=False, gate_dtype=gate_dtype, index_weights_dtype=index_weights_dtype
        )
    linear = {kind: _format_of(stored.linear_of(kind), stored) for kind in LinearKind}
    if fp8_queries and stored.linear_of(LinearKind.QUERY) is Stored.PLAIN:
        linear[LinearKind.QUERY] = Fp8AtLoadFormat(_fp8_form(stored))
    return Formats(
        linear=linear,
        experts=_format_of(stored.experts, stored),
        # One grouped product for all experts is as fast as two, or faster, if all have one format.
        shared_apart=stored.experts is Stored.NVFP4 or stored.experts is not stored.linear_of(LinearKind.FEED_FORWARD),
        gate_dtype=gate_dtype,
        index_weights_dtype=index_weights_dtype,
        fp8_expansion=stored.linear is Stored.FP8,
        fp8_form=_fp8_form(stored),
    )


def _experts_at_load(at_load: Quantization) -> WeightFormat:
    if at_load.compressed:
        return _format_of(at_load.experts, at_load)
    rounding = quantize_groups if at_load.experts is Stored.INT4 else quantize_blocks
    return ExpertsAtLoadFormat(_format_of(at_load.experts, at_load), rounding)


def _fp8_form(stored: Quantization) -> InputForm:
    return InputForm.FP8_POWERS if stored.power_scales else InputForm.FP8_GROUPS


def _format_of(form: Stored, stored: Quantization) -> WeightFormat:
    match form:
        case Stored.PLAIN:
            return PlainFormat()
        case Stored.FP8:
            return BlockFp8Format(_fp8_form(stored))
        case Stored.INT4:
            scale = "weight_scale" if stored.compressed else "weight_scale_inv"
            return W4A8Format(Int4Form(stored.group, scale, stored.static_inputs, stored.pre_scaled))
        case Stored.NVFP4:
            return Nvfp4Format()
        case Stored.PACKED:
            raise AssertionError("packed weights are dequantized, or quantized again")
