"""Rounds tensors to the form in which they are stored: FP8 blocks, INT4 or NVFP4 groups, bfloat16, or unchanged."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.model.quantization import Stored
from engine.weights.stored import GLOBAL_SCALE_SUFFIX, GROUP_SCALE_SUFFIX, SCALE_SUFFIX
from kernels.block_quant import dequantize_blocks, quantize_blocks
from kernels.group_quant import dequantize_groups, quantize_groups
from kernels.nvfp4_quant import dequantize_nvfp4, quantize_nvfp4
from tools.checkpoint_tensors import TensorSpec
from tools.quantize.error import Error, error_of
from tools.quantize.forms import Target
from tools.quantize.source import Source


@dataclass(frozen=True, slots=True)
class Rounded:
    """Tensors to write by name, and their error relative to the source; None if they are the source's own."""

    tensors: Mapping[str, torch.Tensor]
    # How the weight among them is stored.
    form: Stored
    error: Error | None = None


@dataclass(frozen=True, slots=True)
class Int4:
    # [outputs, inputs / 2] int8 and [outputs, inputs / 128] float32, as they are published.
    packed: torch.Tensor
    scales: torch.Tensor
    # The weight that packed and scales stand for: [outputs, inputs] float32.
    stands_for: torch.Tensor

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors to write. name: that of the published matrix."""
        return {name: self.packed, name + SCALE_SUFFIX: self.scales}


def round_tensors(source: Source, specs: Iterable[TensorSpec], target: Target) -> Iterator[Rounded]:
    """The source's tensors in the target's form. One matrix is in memory at a time, or gate and up together."""
    listed = list(specs)
    weights = source.matrices([spec.name for spec in listed if _is_rounded(source, spec, target)])
    for _, members in groupby(listed, key=lambda spec: _joined(spec.name)):
        yield from _round(source, list(members), target, weights)


def _round(
    source: Source, specs: list[TensorSpec], target: Target, weights: Iterator[torch.Tensor]
) -> Iterator[Rounded]:
    """specs: those of one matrix, or of gate and up. weights: the matrices that are to be rounded, in order."""
    if all(target.stored(spec) is Stored.NVFP4 for spec in specs):
        yield from _round_to_nvfp4({spec.name: next(weights) for spec in specs})
        return
    for spec in specs:
        form = target.stored(spec)
        if not _is_rounded(source, spec, target):
            yield _as_published(source, spec)
        elif form is Stored.INT4:
            weight = next(weights)
            rounded = round_to_int4(weight)
            yield Rounded(rounded.tensors(spec.name), form, error_of(rounded.stands_for, weight))
        elif form is Stored.FP8:
            yield _round_to_fp8(spec.name, next(weights))
        else:
            yield Rounded({spec.name: next(weights).bfloat16()}, form)


def _is_rounded(source: Source, spec: TensorSpec, target: Target) -> bool:
    """Whether the tensor has to be rounded: one that has the target's form already stays as it is."""
    return target.stored(spec) is not source.form(spec)


def _joined(name: str) -> str:
    """A name that is equal for gate and up of one feed-forward, which many engines multiply as one matrix."""
    return name.replace(".gate_proj.", ".gate_up_proj.").replace(".up_proj.", ".gate_up_proj.")


def _as_published(source: Source, spec: TensorSpec) -> Rounded:
    tensors = dict(source.published(spec.name))
    if not spec.full_precision and source.stored.linear is not Stored.FP8:
        # Published quantized checkpoints hold everything else in bfloat16.
        tensors[spec.name] = tensors[spec.name].bfloat16()
    return Rounded(tensors, source.form(spec))


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
    return Rounded({name: values, name + SCALE_SUFFIX: scale}, Stored.FP8, error_of(found, weight))


def _round_to_nvfp4(weights: Mapping[str, torch.Tensor]) -> Iterator[Rounded]:
    """Round matrices with one global scale for all, as engines require of matrices that they multiply as one."""
    largest = torch.stack([torch.linalg.vector_norm(weight, ord=torch.inf) for weight in weights.values()]).amax()
    for name, weight in weights.items():
        codes, scales, global_scale = quantize_nvfp4(weight, largest)
        error = error_of(dequantize_nvfp4(codes, scales).mul_(global_scale), weight)
        tensors = {name: codes, name + GROUP_SCALE_SUFFIX: scales, name + GLOBAL_SCALE_SUFFIX: global_scale}
        yield Rounded(tensors, Stored.NVFP4, error)
