"""Weights in NVFP4 as NVIDIA's ModelOpt publishes them: e2m1 codes in groups of 16 with an e4m3 scale each
(`weight_scale`), and a scale of each matrix (`weight_scale_2`). Activations stay in bfloat16: `input_scale` is for
cards that multiply four-bit numbers.
"""

from collections.abc import Sequence

import torch

from engine.model.activations import Activations, InputForm, Sent
from engine.model.expert_group import ExpertGroup
from engine.model.formats.interface import ExpertShape, NewTensor
from engine.model.formats.places import ExpertTensor, LinearTensor, expert_parameters, linear_parameters
from engine.model.parameters import NamedParameters, whole
from kernels.fp8_gemm import Workspace
from kernels.moe_permute import expand
from kernels.nvfp4_gemm import Nvfp4, arranged, nvfp4, nvfp4_grouped_gemm
from kernels.nvfp4_gemm.weight import MULTIPLE
from kernels.nvfp4_quant import GROUP
from kernels.swiglu import swiglu

_GLOBAL = "weight_scale_2"


class Nvfp4Format:
    """Takes multiples of 64, and published matrices of equal rows."""

    def takes(self, parts: Sequence[int], inputs: int) -> bool:
        return len(set(parts)) == 1 and parts[0] % MULTIPLE == 0 and inputs % MULTIPLE == 0

    def linear(self, parts: Sequence[int], inputs: int, new: NewTensor) -> "Nvfp4Linear":
        return Nvfp4Linear(parts, inputs, new)

    def takes_experts(self, shape: ExpertShape) -> bool:
        return not shape.shared and shape.hidden % MULTIPLE == 0 and shape.width % MULTIPLE == 0

    def experts(self, shape: ExpertShape, new: NewTensor) -> "Nvfp4Experts":
        return Nvfp4Experts(shape, new)


class Nvfp4Linear:
    input_form = InputForm.PLAIN
    weight = None

    def __init__(self, parts: Sequence[int], inputs: int, new: NewTensor) -> None:
        self._parts = parts
        self._weight = _new_weight(new, 1, sum(parts), inputs, len(parts))

    def parameters(self, *names: str) -> NamedParameters:
        codes = LinearTensor("weight", self._weight.codes[0])
        scales = LinearTensor("weight_scale", self._weight.scales[0])
        yield from linear_parameters([codes, scales], names, self._parts)
        for name, scale in zip(names, self._weight.global_scales[0], strict=True):
            yield whole(f"{name}.{_GLOBAL}", scale.view(1))

    def finish(self) -> None:
        self._weight = arranged(self._weight)

    def forward(self, x: Activations, workspace: Workspace) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        rows = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
        return nvfp4_grouped_gemm(x.contiguous(), self._weight, rows)


class Nvfp4Experts:
    input_form = InputForm.PLAIN

    def __init__(self, shape: ExpertShape, new: NewTensor) -> None:
        self._shape = shape
        self._gate_up = _new_weight(new, shape.count, 2 * shape.width, shape.hidden, 2)
        self._down = _new_weight(new, shape.count, shape.hidden, shape.width, 1)

    def parameters(self, prefix: str) -> NamedParameters:
        codes = ExpertTensor("weight", self._gate_up.codes, self._down.codes)
        scales = ExpertTensor("weight_scale", self._gate_up.scales, self._down.scales)
        yield from expert_parameters([codes, scales], prefix, self._shape)
        for expert, number in enumerate(self._shape.numbers):
            name = f"{prefix}.experts.{number}"
            gate, up = self._gate_up.global_scales[expert]
            yield whole(f"{name}.gate_proj.{_GLOBAL}", gate.view(1))
            yield whole(f"{name}.up_proj.{_GLOBAL}", up.view(1))
            yield whole(f"{name}.down_proj.{_GLOBAL}", self._down.global_scales[expert])

    def finish(self, group: ExpertGroup) -> None:
        self._gate_up, self._down = arranged(self._gate_up), arranged(self._down)

    def weights(self) -> Sequence[torch.Tensor]:
        return [
            tensor
            for matrices in (self._gate_up, self._down)
            for tensor in (matrices.codes, matrices.scales, matrices.global_scales)
        ]

    def to_send(self, hidden: Activations) -> Sent:
        return hidden

    def forward(self, hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(hidden, torch.Tensor)
        placed = expand(hidden, choices, self._shape.count, self._shape.first)
        inner = swiglu(nvfp4_grouped_gemm(placed.rows, self._gate_up, placed.ends))
        return nvfp4_grouped_gemm(inner, self._down, placed.ends), placed.positions


def _new_weight(new: NewTensor, experts: int, outputs: int, inputs: int, parts: int) -> Nvfp4:
    return nvfp4(
        new(experts, outputs, inputs // 2, dtype=torch.uint8),
        new(experts, outputs, inputs // GROUP, dtype=torch.float8_e4m3fn),
        new(experts, parts, dtype=torch.float32),
    )
