"""Routed experts in INT4 with FP8 activations (W4A8): groups of 128 or 32 inputs, one activation scale a row or an
expert.

compressed-tensors publishes groups of either size, with `weight_scale` of each. `quant_method` w4afp8 has packed
weights, `weight_scale_inv` of each group of 128, and if activations have static scales, `w1.input_scale` (gate), `w2`
(down) and `w3` (up) of each expert. AWQ (Lin et al., 2024) adds
`pre_quant_scale`, by which the channels of an input are multiplied: one of the layer for gate and up, one of each
expert for down.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.model.activations import Activations, InputForm, Sent
from engine.model.expert_group import ExpertGroup
from engine.model.formats.interface import ExpertShape, Linear, NewTensor
from engine.model.formats.places import ExpertTensor, expert_parameters
from engine.model.parameters import NamedParameters, cut, whole
from kernels.expert_rows import place_quantized, place_rows, quantize_rows, swiglu_rows
from kernels.w4a8_gemm import (
    Int4Experts,
    Int4FeedForward,
    ScaledRows,
    few_tokens_feed_forward,
    int4_feed_forward,
    pack_published,
    profiled,
    published_places,
    takes_few_tokens,
    w4a8_feed_forward,
    w4a8_grouped_gemm,
)
from kernels.w4a8_gemm.operands import TILE_INPUTS, TILE_OUTPUTS, tile_bytes


@dataclass(frozen=True, slots=True)
class Int4Form:
    """How the experts are published."""

    # Inputs that share a scale, and what these scales' names end in.
    group: int = 128
    scale: str = "weight_scale_inv"
    # Whether activations have scales from calibration, else one of each row; and whether AWQ scales their channels.
    static: bool = False
    pre_scaled: bool = False


class W4A8Format:
    def __init__(self, form: Int4Form) -> None:
        self._form = form

    def takes(self, parts: Sequence[int], inputs: int) -> bool:
        """Only experts come in INT4."""
        return False

    def linear(self, parts: Sequence[int], inputs: int, new: NewTensor) -> Linear:
        raise AssertionError("not a format of linear layers")

    def takes_experts(self, shape: ExpertShape) -> bool:
        return not shape.shared and shape.hidden % TILE_INPUTS == 0 and shape.width % TILE_INPUTS == 0

    def experts(self, shape: ExpertShape, new: NewTensor) -> "W4A8Experts":
        return W4A8Experts(shape, new, self._form)


class W4A8Experts:
    # Rows are quantized as they are placed, or before they travel.
    input_form = InputForm.PLAIN

    def __init__(self, shape: ExpertShape, new: NewTensor, form: Int4Form) -> None:
        self._shape = shape
        self._scale = form.scale
        self._gate_up = _Matrices(new, shape.count, 2 * shape.width, shape.hidden, form.group, in_turns=True)
        self._down = _Matrices(new, shape.count, shape.hidden, shape.width, form.group)
        # [experts, 3]: of w1 (gate), w2 (down) and w3 (up).
        self._input_scales = new(shape.count, 3, dtype=torch.float32) if form.static else None
        self._gate_up_pre_scale = new(shape.hidden, dtype=torch.float32) if form.pre_scaled else None
        self._down_pre_scale = new(shape.count, shape.width, dtype=torch.float32) if form.pre_scaled else None
        # Set by `finish` if scales are static: [experts], and all that one kernel needs for both products.
        self._gate_up_input_scale: torch.Tensor | None = None
        self._together: Int4FeedForward | None = None

    def parameters(self, prefix: str) -> NamedParameters:
        values = ExpertTensor("weight", self._gate_up.values, self._down.values)
        scales = ExpertTensor(self._scale, self._gate_up.scales, self._down.scales)
        yield from expert_parameters([values, scales], prefix, self._shape)
        if self._input_scales is not None:
            for expert, each in zip(self._shape.numbers, self._input_scales, strict=True):
                for index in range(3):
                    yield whole(f"{prefix}.experts.{expert}.w{index + 1}.input_scale", each[index : index + 1])
        if self._gate_up_pre_scale is not None and self._down_pre_scale is not None:
            yield whole(f"{prefix}.experts.pre_quant_scale", self._gate_up_pre_scale)
            for expert, scale in zip(self._shape.numbers, self._down_pre_scale, strict=True):
                parameter = whole(f"{prefix}.experts.{expert}.down_proj.pre_quant_scale", scale)
                yield from cut([parameter], 0, self._shape.width_share)

    def finish(self, group: ExpertGroup) -> None:
        self._gate_up.finish(group, profile=True)
        # If one kernel computes both products, it tiles this one as gate and up.
        self._down.finish(group, profile=self._input_scales is None)
        if self._input_scales is not None:
            gate, down, up = self._input_scales.unbind(1)
            # A token is quantized once for all its experts, on whichever rank they are.
            largest = group.largest(float(torch.maximum(gate, up).amax()))
            self._gate_up_input_scale = torch.full_like(gate, largest)
            matrices = self._gate_up.weight, self._down.weight
            self._together = int4_feed_forward(*matrices, down, self._down_pre_scale)

    def weights(self) -> Sequence[torch.Tensor]:
        # The input of gate and up has one scale for all experts, which need not move with them.
        own = [self._gate_up.tiles, self._down.tiles]
        if self._together is not None:
            return [*own, self._together.input_scales, self._together.factors]
        return own if self._down_pre_scale is None else [*own, self._down_pre_scale]

    def to_send(self, hidden: Activations) -> Sent:
        assert isinstance(hidden, torch.Tensor)
        return quantize_rows(hidden, self._gate_up_pre_scale, self._gate_up_input_scale)

    def forward(self, hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, together = self._shape, self._together
        pre_scale, scale = self._gate_up_pre_scale, self._gate_up_input_scale
        if isinstance(hidden, ScaledRows):
            rows, layout = place_quantized(hidden, choices, shape.count, shape.first, shape.elsewhere)
        else:
            assert isinstance(hidden, torch.Tensor)
            # If other ranks have experts too, tiles are faster.
            if together is not None and not shape.elsewhere and takes_few_tokens(hidden, choices, together):
                assert scale is not None
                return few_tokens_feed_forward(hidden, choices, together, pre_scale, scale)
            rows, layout = place_rows(hidden, choices, shape.count, pre_scale, scale, shape.first, shape.elsewhere)
        if together is not None:
            return w4a8_feed_forward(rows, together, layout), layout.positions
        gate_up = w4a8_grouped_gemm(rows, self._gate_up.weight, layout)
        inner = swiglu_rows(gate_up, layout, self._down_pre_scale)
        return w4a8_grouped_gemm(inner, self._down.weight, layout), layout.positions


class _Matrices:
    """INT4 matrices of all experts: filled in the order in which they are published, then packed in place."""

    def __init__(
        self, new: NewTensor, experts: int, outputs: int, inputs: int, group: int, *, in_turns: bool = False
    ) -> None:
        """group: inputs that share a scale; in_turns: whether gate's and up's outputs take turns when packed."""
        self._in_turns = in_turns
        shape = (experts, outputs // TILE_OUTPUTS, inputs // TILE_INPUTS, tile_bytes(group))
        self.tiles = new(*shape, dtype=torch.uint8)
        # Places of matrices [outputs, inputs / 2] int8 and [outputs, inputs / group] bfloat16, which do not lie in one
        # piece: [experts, tiles, 64, tiles along the inputs, columns of a tile].
        self.values, self.scales = published_places(self.tiles)
        self._packed: Int4Experts | None = None

    @property
    def weight(self) -> Int4Experts:
        assert self._packed is not None
        return self._packed

    def finish(self, group: ExpertGroup, *, profile: bool) -> None:
        packed = pack_published(self.tiles, self._in_turns)
        # Taken over all ranks, since experts of other ranks may move here.
        has_minimum = bool(group.largest(float(packed.has_minimum)))
        packed = replace(packed, has_minimum=has_minimum)
        self._packed = profiled(packed) if profile else packed
