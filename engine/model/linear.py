"""Linear layers in the form that their weights are kept in: the model's dtype, or FP8 blocks as published."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.model.parameters import Allocator, NamedParameters
from kernels.act_quant import Quantized, quantize
from kernels.block_quant import BLOCK
from kernels.fp8_gemm import BlockScaled, fp8_gemm

SCALE_SUFFIX = "_scale_inv"


class Linear:
    """x times the weight transposed. The weight's rows may be several published matrices, one after another."""

    def __init__(self, inputs: int, outputs: Sequence[int], allocate: Allocator) -> None:
        self._outputs = outputs
        self._weight = allocate.weight(sum(outputs), inputs, parts=outputs)

    @property
    def quantized(self) -> bool:
        """Whether it multiplies FP8 activations: who makes its input may quantize on the way."""
        return isinstance(self._weight, BlockScaled)

    def parameters(self, *names: str) -> NamedParameters:
        """names: of the published matrices, in order."""
        first = 0
        for name, rows in zip(names, self._outputs, strict=True):
            yield from weight_parameters(f"{name}.weight", self._weight, slice(first, first + rows))
            first += rows

    def forward(self, x: torch.Tensor | Quantized) -> torch.Tensor:
        """[tokens, inputs], quantized only where the layer is, to [tokens, sum of outputs]."""
        if isinstance(self._weight, BlockScaled):
            return fp8_gemm(x if isinstance(x, Quantized) else quantize(x), self._weight)
        assert isinstance(x, torch.Tensor)
        return functional.linear(x, self._weight)


def weight_parameters(
    name: str, weight: torch.Tensor | BlockScaled, rows: slice, expert: int | slice | None = None
) -> NamedParameters:
    """A published matrix's place: rows of a fused weight, of one expert (or some) where there are many; FP8 with its
    scales."""
    if isinstance(weight, torch.Tensor):
        yield name, _of_expert(weight, expert)[..., rows, :]
        return
    yield name, _of_expert(weight.values, expert)[..., rows, :]
    blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
    yield name + SCALE_SUFFIX, _of_expert(weight.scales, expert)[..., blocks, :]


def _of_expert(weight: torch.Tensor, expert: int | slice | None) -> torch.Tensor:
    return weight if expert is None else weight[expert]
