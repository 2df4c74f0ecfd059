"""What is stored of one tensor: FP8 blocks, INT4 groups, or the tensor as it is."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from engine.model.quantization import Stored
from engine.weights.stored import SCALE_SUFFIX
from kernels.block_quant import dequantize_blocks, quantize_blocks
from kernels.group_quant import dequantize_groups, quantize_groups
from tools.checkpoint_tensors import TensorSpec
from tools.quantize.error import Error, error_of
from tools.quantize.source import Source

_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


class Format(Enum):
    # Every linear weight in FP8 blocks of 128x128.
    FP8 = "fp8"
    # Routed experts in INT4, every other linear weight in FP8.
    W4A8 = "w4a8"


@dataclass(frozen=True, slots=True)
class Rounded:
    """Tensors to write by name, and how far they are from the source, if they are not the source's own."""

    tensors: Mapping[str, torch.Tensor]
    error: Error | None = None


@dataclass(frozen=True, slots=True)
class Int4:
    # [outputs, inputs / 2] int8 and [outputs, inputs / 128] float32, as they are published.
    packed: torch.Tensor
    scales: torch.Tensor
    # The weight that they stand for: [outputs, inputs] float32.
    stands_for: torch.Tensor

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """name: of the published matrix."""
        return {name: self.packed, name + SCALE_SUFFIX: self.scales}


def is_expert(name: str) -> bool:
    """Whether it belongs to a routed expert."""
    return bool(_EXPERT.search(name))


def round_tensors(source: Source, specs: Iterable[TensorSpec], form: Format) -> Iterator[tuple[TensorSpec, Rounded]]:
    """Tensors of the source in the form in which the checkpoint has them."""
    listed = list(specs)
    weights = source.matrices([spec.name for spec in listed if _is_rounded(source, spec, form)])
    for spec in listed:
        if not _is_rounded(source, spec, form):
            yield spec, _as_published(source, spec)
        elif form is Format.W4A8 and is_expert(spec.name):
            weight = next(weights)
            rounded = round_to_int4(weight)
            yield spec, Rounded(rounded.tensors(spec.name), error_of(rounded.stands_for, weight))
        else:
            yield spec, _round_to_fp8(spec.name, next(weights))


def _is_rounded(source: Source, spec: TensorSpec, form: Format) -> bool:
    """FP8 weights of the source stay as they are, unless they become INT4."""
    to_int4 = form is Format.W4A8 and is_expert(spec.name)
    return spec.quantizable and (to_int4 or source.stored.linear is Stored.PLAIN)


def _as_published(source: Source, spec: TensorSpec) -> Rounded:
    tensors = dict(source.published(spec.name))
    if not spec.full_precision and source.stored.linear is Stored.PLAIN:
        # Published FP8 checkpoints hold everything else in bfloat16.
        tensors[spec.name] = tensors[spec.name].bfloat16()
    return Rounded(tensors)


def round_to_int4(
    weight: torch.Tensor, pre_scale: torch.Tensor | None = None, importance: torch.Tensor | None = None
) -> Int4:
    """weight: [outputs, inputs] float32; pre_scale: [inputs], by which its input's channels will be multiplied;
    importance: [inputs], as `quantize_groups` takes it.
    """
    packed, scales = quantize_groups(weight if pre_scale is None else weight / pre_scale, importance)
    found = dequantize_groups(packed, scales)
    return Int4(packed, scales, found if pre_scale is None else found.mul_(pre_scale))


def _round_to_fp8(name: str, weight: torch.Tensor) -> Rounded:
    values, scale = quantize_blocks(weight)
    found = torch.empty_like(weight)
    dequantize_blocks(values, scale, found)
    return Rounded({name: values, name + SCALE_SUFFIX: scale}, error_of(found, weight))
