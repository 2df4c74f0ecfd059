"""Weights in FP8 as DeepSeek publishes them: e4m3 in blocks of 128x128 with a float32 scale each."""

from collections.abc import Sequence

import torch

from engine.model.activations import Activations, InputForm, Sent
from engine.model.expert_group import ExpertGroup
from engine.model.formats.interface import ExpertShape, NewTensor
from engine.model.formats.places import ExpertTensor, LinearTensor, expert_parameters, linear_parameters
from engine.model.parameters import NamedParameters
from kernels.act_quant import Quantized
from kernels.block_quant import BLOCK
from kernels.fp8_gemm import BlockScaled, Workspace, block_scaled, fp8_gemm
from kernels.grouped_gemm import chosen_feed_forward, grouped_fp8_gemm
from kernels.moe_permute import expand_quantized
from kernels.swiglu import swiglu_quantize

# Outputs of a linear layer come in whole tiles of its product.
OUTPUTS_MULTIPLE = 64


class BlockFp8Format:
    """Takes whole blocks along the inputs, and published matrices of which no two share a block."""

    def __init__(self, input_form: InputForm = InputForm.FP8_GROUPS) -> None:
        """input_form: how activations are quantized."""
        self._input_form = input_form

    def takes(self, parts: Sequence[int], inputs: int) -> bool:
        straddles = any(rows % BLOCK for rows in parts[:-1])
        return not straddles and sum(parts) % OUTPUTS_MULTIPLE == 0 and inputs % BLOCK == 0

    def linear(self, parts: Sequence[int], inputs: int, new: NewTensor) -> "BlockFp8Linear":
        return BlockFp8Linear(parts, inputs, new, self._input_form)

    def takes_experts(self, shape: ExpertShape) -> bool:
        return shape.hidden % BLOCK == 0 and shape.width % BLOCK == 0

    def experts(self, shape: ExpertShape, new: NewTensor) -> "BlockFp8Experts":
        return BlockFp8Experts(shape, new, self._input_form)


class BlockFp8Linear:
    def __init__(self, parts: Sequence[int], inputs: int, new: NewTensor, input_form: InputForm) -> None:
        self.input_form = input_form
        self._parts = parts
        self.weight = _new_weight(new, sum(parts), inputs)

    def parameters(self, *names: str) -> NamedParameters:
        values = LinearTensor("weight", self.weight.values)
        scales = LinearTensor("weight_scale_inv", self.weight.scales, unit=BLOCK)
        yield from linear_parameters([values, scales], names, self._parts)

    def finish(self) -> None:
        """Nothing to do: the weight is multiplied as it is published."""

    def forward(self, x: Activations, workspace: Workspace) -> torch.Tensor:
        return fp8_gemm(x, self.weight, workspace)


class BlockFp8Experts:
    def __init__(self, shape: ExpertShape, new: NewTensor, input_form: InputForm) -> None:
        self.input_form = input_form
        self._shape = shape
        self._gate_up = _new_weight(new, shape.count, 2 * shape.width, shape.hidden)
        self._down = _new_weight(new, shape.count, shape.hidden, shape.width)

    def parameters(self, prefix: str) -> NamedParameters:
        values = ExpertTensor("weight", self._gate_up.values, self._down.values)
        scales = ExpertTensor("weight_scale_inv", self._gate_up.scales, self._down.scales)
        yield from expert_parameters([values, scales], prefix, self._shape)

    def finish(self, group: ExpertGroup) -> None:
        """Nothing to do: weights are multiplied as they are published."""

    def weights(self) -> Sequence[torch.Tensor]:
        tensors = self._gate_up.values, self._gate_up.scales, self._down.values, self._down.scales
        return [tensor[: self._shape.routed] for tensor in tensors]

    def to_send(self, hidden: Activations) -> Sent:
        return hidden

    def forward(self, hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(hidden, Quantized)
        shape = self._shape
        made = chosen_feed_forward(hidden, choices, self._gate_up, self._down, shape.first, shape.shared)
        if made is not None:
            return made
        placed = expand_quantized(hidden, choices, shape.count, shape.shared, shape.first, shape.elsewhere)
        gate_up = grouped_fp8_gemm(placed.rows, self._gate_up, placed.layout)
        inner = swiglu_quantize(gate_up, placed.positions, powers=self.input_form.powers)
        return grouped_fp8_gemm(inner, self._down, placed.layout), placed.positions


def _new_weight(new: NewTensor, *shape: int) -> BlockScaled:
    """shape: [outputs, inputs], or with a leading expert."""
    *experts, outputs, inputs = shape
    values = new(*shape, dtype=torch.float8_e4m3fn)
    return block_scaled(values, new(*experts, -(-outputs // BLOCK), inputs // BLOCK, dtype=torch.float32))
