"""Which layers keep their weights in which format."""

from dataclasses import dataclass

import torch

from engine.model.formats.block_fp8 import BlockFp8Format
from engine.model.formats.interface import WeightFormat
from engine.model.formats.plain import PlainFormat
from engine.model.formats.w4a8 import W4A8Format
from engine.model.quantization import Quantization, Stored


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of a model. A layer whose shape its format does not take is plain."""

    # Attention, dense feed-forward layers, and shared experts that are computed apart.
    linear: WeightFormat
    experts: WeightFormat
    # Whether shared experts are a layer of their own, instead of the last ones of the experts' grouped products.
    shared_apart: bool
    gate_dtype: torch.dtype


def choose_formats(stored: Quantization, dtype: torch.dtype, *, dequantize: bool) -> Formats:
    """Quantized weights stay as they are published, or are brought to the model's dtype if `dequantize`."""
    if dequantize or not stored.quantized:
        # The gate's choice must not depend on the model's dtype.
        return Formats(PlainFormat(), PlainFormat(), shared_apart=False, gate_dtype=torch.float32)
    # Quantized checkpoints hold the gate in bfloat16.
    return Formats(
        linear=_format_of(stored.linear, stored),
        experts=_format_of(stored.experts, stored),
        # One grouped product for all experts is as fast as two, or faster, if all have one format.
        shared_apart=stored.experts is not stored.linear,
        gate_dtype=dtype,
    )


def _format_of(form: Stored, stored: Quantization) -> WeightFormat:
    match form:
        case Stored.PLAIN:
            return PlainFormat()
        case Stored.FP8:
            return BlockFp8Format()
        case Stored.INT4:
            return W4A8Format(static=stored.static_inputs, pre_scaled=stored.pre_scaled)
