"""Weights that are published plain, and quantized when they are loaded."""

from collections.abc import Callable, Sequence

import torch

from engine.model.activations import Activations, InputForm, Sent
from engine.model.expert_group import ExpertGroup
from engine.model.formats.block_fp8 import BlockFp8Format
from engine.model.formats.interface import Experts, ExpertShape, NewTensor, WeightFormat
from engine.model.formats.places import ExpertTensor, LinearTensor, expert_parameters, linear_parameters
from engine.model.parameters import NamedParameters, merged_shape
from kernels.block_quant import quantize_blocks
from kernels.fp8_gemm import BlockScaled, Workspace, block_scaled, fp8_gemm

# Rounds a matrix [outputs, inputs]. Returns its values and their scales as checkpoints of the form have them.
Rounding = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
SCALE = "_scale_inv"


class Fp8AtLoadFormat:
    """Linear layers of what blocks of 128x128 divide, as `BlockFp8Format` takes them."""

    def __init__(self, input_form: InputForm = InputForm.FP8_GROUPS) -> None:
        """input_form: as there."""
        self._input_form = input_form

    def takes(self, parts: Sequence[int], inputs: int) -> bool:
        return BlockFp8Format().takes(parts, inputs)

    def linear(self, parts: Sequence[int], inputs: int, new: NewTensor) -> "Fp8AtLoadLinear":
        return Fp8AtLoadLinear(parts, inputs, new, self._input_form)

    def takes_experts(self, shape: ExpertShape) -> bool:
        """`ExpertsAtLoadFormat` does."""
        return False

    def experts(self, shape: ExpertShape, new: NewTensor) -> Experts:
        raise AssertionError("not a format of experts")


class Fp8AtLoadLinear:
    def __init__(self, parts: Sequence[int], inputs: int, new: NewTensor, input_form: InputForm) -> None:
        self.input_form = input_form
        self._parts = parts
        self._published: torch.Tensor | None = new(sum(parts), inputs)
        # Set by `finish`.
        self.weight: BlockScaled | None = None

    def parameters(self, *names: str) -> NamedParameters:
        assert self._published is not None
        yield from linear_parameters([LinearTensor("weight", self._published)], names, self._parts)

    def finish(self) -> None:
        published, self._published = self._published, None
        assert published is not None
        self.weight = block_scaled(*quantize_blocks(published))

    def forward(self, x: Activations, workspace: Workspace) -> torch.Tensor:
        assert self.weight is not None
        return fp8_gemm(x, self.weight, workspace)


class Scratch:
    """Memory for the published weights of one layer's experts, which all layers use in turn: a layer's parameters are
    filled, and it is finished, before those of the next are filled.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, ...], torch.Tensor] = {}
        self._users = 0

    def take(self, shapes: Sequence[tuple[int, ...]], new: NewTensor) -> list[torch.Tensor]:
        """Tensors of these shapes, of the model's dtype. Equal shapes in another call are the same memory."""
        self._users += 1
        for shape in shapes:
            if shape not in self._tensors:
                self._tensors[shape] = new(*shape)
        return [self._tensors[shape] for shape in shapes]

    def leave(self) -> None:
        """One caller of `take` no longer needs the tensors; the last one frees them."""
        self._users -= 1
        if not self._users:
            self._tensors.clear()


class ExpertsAtLoadFormat:
    """Experts of another format, whose published weights are plain."""

    def __init__(self, kept: WeightFormat, rounding: Rounding) -> None:
        """kept: in which they are multiplied, with a scale for each block or group."""
        self._kept = kept
        self._rounding = rounding
        self._scratch = Scratch()

    def takes(self, parts: Sequence[int], inputs: int) -> bool:
        """`Fp8AtLoadFormat` does."""
        return False

    def linear(self, parts: Sequence[int], inputs: int, new: NewTensor) -> Fp8AtLoadLinear:
        raise AssertionError("not a format of linear layers")

    def takes_experts(self, shape: ExpertShape) -> bool:
        return self._kept.takes_experts(shape)

    def experts(self, shape: ExpertShape, new: NewTensor) -> "ExpertsAtLoad":
        return ExpertsAtLoad(self._kept.experts(shape, new), shape, new, self._rounding, self._scratch)


class ExpertsAtLoad:
    def __init__(self, kept: Experts, shape: ExpertShape, new: NewTensor, rounding: Rounding, scratch: Scratch) -> None:
        self._kept = kept
        self._shape = shape
        self._rounding = rounding
        self._scratch = scratch
        gate_up, down = (shape.count, 2 * shape.width, shape.hidden), (shape.count, shape.hidden, shape.width)
        self._published: list[torch.Tensor] = scratch.take([gate_up, down], new)

    @property
    def input_form(self) -> InputForm:
        return self._kept.input_form

    def parameters(self, prefix: str) -> NamedParameters:
        gate_up, down = self._published
        yield from expert_parameters([ExpertTensor("weight", gate_up, down)], prefix, self._shape)

    def finish(self, group: ExpertGroup) -> None:
        kept = {parameter.name: parameter.place for parameter in self._kept.parameters("")}
        for parameter in self.parameters(""):
            rounded = self._rounding(parameter.place.reshape(merged_shape(parameter.place)))
            for place, tensor in zip((kept[parameter.name], kept[parameter.name + SCALE]), rounded, strict=True):
                place.copy_(tensor.reshape(place.shape))
        self._published.clear()
        self._scratch.leave()
        self._kept.finish(group)

    def weights(self) -> Sequence[torch.Tensor]:
        return self._kept.weights()

    def to_send(self, hidden: Activations) -> Sent:
        return self._kept.to_send(hidden)

    def forward(self, hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kept.forward(hidden, choices)
