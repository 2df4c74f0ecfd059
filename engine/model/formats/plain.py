"""Weights of the model's dtype."""

from collections.abc import Sequence

import torch

from engine.model.activations import Activations, InputForm, Sent
from engine.model.expert_group import ExpertGroup
from engine.model.formats.interface import ExpertShape, NewTensor
from engine.model.formats.places import ExpertTensor, LinearTensor, expert_parameters, linear_parameters
from engine.model.parameters import NamedParameters
from kernels.fp8_gemm import Workspace
from kernels.grouped_gemm import chosen_feed_forward, grouped_gemm, grouped_swiglu, listed_feed_forward
from kernels.linear import linear
from kernels.moe_permute import expand
from kernels.moe_permute.layout import ListedRows


class PlainFormat:
    """Takes every shape."""

    def takes(self, parts: Sequence[int], inputs: int) -> bool:
        return True

    def linear(self, parts: Sequence[int], inputs: int, new: NewTensor) -> "PlainLinear":
        return PlainLinear(parts, inputs, new)

    def takes_experts(self, shape: ExpertShape) -> bool:
        return True

    def experts(self, shape: ExpertShape, new: NewTensor) -> "PlainExperts":
        return PlainExperts(shape, new)


class PlainLinear:
    input_form = InputForm.PLAIN

    def __init__(self, parts: Sequence[int], inputs: int, new: NewTensor) -> None:
        self._parts = parts
        self.weight = new(sum(parts), inputs)

    def parameters(self, *names: str) -> NamedParameters:
        yield from linear_parameters([LinearTensor("weight", self.weight)], names, self._parts)

    def finish(self) -> None:
        """Nothing to do: the weight is multiplied as it is published."""

    def forward(self, x: Activations, workspace: Workspace) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return linear(x, self.weight)


class PlainExperts:
    input_form = InputForm.PLAIN

    def __init__(self, shape: ExpertShape, new: NewTensor) -> None:
        self._shape = shape
        self._gate_up = new(shape.count, 2 * shape.width, shape.hidden)
        self._down = new(shape.count, shape.hidden, shape.width)

    def parameters(self, prefix: str) -> NamedParameters:
        yield from expert_parameters([ExpertTensor("weight", self._gate_up, self._down)], prefix, self._shape)

    def finish(self, group: ExpertGroup) -> None:
        """Nothing to do: weights are multiplied as they are published."""

    def weights(self) -> Sequence[torch.Tensor]:
        return self._gate_up[: self._shape.routed], self._down[: self._shape.routed]

    def to_send(self, hidden: Activations) -> Sent:
        return hidden

    def forward(self, hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(hidden, torch.Tensor)
        shape = self._shape
        made = chosen_feed_forward(hidden, choices, self._gate_up, self._down, shape.first, shape.shared)
        if made is not None:
            return made
        placed = expand(hidden, choices, shape.count, shape.first)
        inner = grouped_swiglu(placed.rows, self._gate_up, placed.ends)
        return grouped_gemm(inner, self._down, placed.ends), placed.positions

    def forward_listed(self, hidden: Sent, listed: ListedRows) -> torch.Tensor:
        """The rows of `forward`, if all experts are here and a list has their tokens: then no token is copied."""
        assert isinstance(hidden, torch.Tensor)
        return listed_feed_forward(hidden, listed, self._gate_up, self._down)
