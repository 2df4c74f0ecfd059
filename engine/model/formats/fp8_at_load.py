"""Linear layers that are published plain and multiplied in FP8."""

from collections.abc import Sequence

import torch

from engine.model.activations import Activations, InputForm
from engine.model.formats.block_fp8 import BlockFp8Format
from engine.model.formats.interface import Experts, ExpertShape, NewTensor
from engine.model.formats.places import LinearTensor, linear_parameters
from engine.model.parameters import NamedParameters
from kernels.block_quant import quantize_blocks
from kernels.fp8_gemm import BlockScaled, Workspace, block_scaled, fp8_gemm


class Fp8AtLoadFormat:
    """Takes what blocks of 128x128 divide, as `BlockFp8Format` does."""

    def takes(self, parts: Sequence[int], inputs: int) -> bool:
        return BlockFp8Format().takes(parts, inputs)

    def linear(self, parts: Sequence[int], inputs: int, new: NewTensor) -> "Fp8AtLoadLinear":
        return Fp8AtLoadLinear(parts, inputs, new)

    def takes_experts(self, shape: ExpertShape) -> bool:
        """Only linear layers are quantized at load."""
        return False

    def experts(self, shape: ExpertShape, new: NewTensor) -> Experts:
        raise AssertionError("not a format of experts")


class Fp8AtLoadLinear:
    input_form = InputForm.FP8_GROUPS

    def __init__(self, parts: Sequence[int], inputs: int, new: NewTensor) -> None:
        self._parts = parts
        self._published: torch.Tensor | None = new(sum(parts), inputs)
        self._weight: BlockScaled | None = None

    def parameters(self, *names: str) -> NamedParameters:
        assert self._published is not None
        yield from linear_parameters([LinearTensor("weight", self._published)], names, self._parts)

    def finish(self) -> None:
        published, self._published = self._published, None
        assert published is not None
        self._weight = block_scaled(*quantize_blocks(published))

    def forward(self, x: Activations, workspace: Workspace) -> torch.Tensor:
        assert self._weight is not None and not isinstance(x, torch.Tensor)
        return fp8_gemm(x, self._weight, workspace)
