"""Where published tensors go in weights that join several of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.model.formats.interface import ExpertShape
from engine.model.parameters import NamedParameters, cut, joined_columns, joined_rows, whole


@dataclass(frozen=True, slots=True)
class LinearTensor:
    """One of the tensors that make up a linear layer's weight."""

    # The end of its name, after that of the published matrix.
    suffix: str
    # [outputs / unit, ...]
    tensor: torch.Tensor
    # How many outputs share a row of it.
    unit: int = 1


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One of the tensors that make up the experts' weights; for each expert gate over up, and down."""

    suffix: str
    # [experts, rows of gate and as many of up, ...]; a matrix has the dimensions of a `Parameter`'s place.
    gate_up: torch.Tensor
    # [experts, rows, ...]
    down: torch.Tensor


def linear_parameters(tensors: Iterable[LinearTensor], names: Sequence[str], parts: Sequence[int]) -> NamedParameters:
    """names: of the published matrices that lie one after another, with their rows in `parts`."""
    for each in tensors:
        first = 0
        for name, rows in zip(names, parts, strict=True):
            yield whole(f"{name}.{each.suffix}", each.tensor[first // each.unit : -(-(first + rows) // each.unit)])
            first += rows


def expert_parameters(tensors: Iterable[ExpertTensor], prefix: str, shape: ExpertShape) -> NamedParameters:
    """Shared experts are published as one layer that is as wide as all of them."""
    for each in tensors:
        gate, up = each.gate_up.chunk(2, dim=1)
        for expert, number in enumerate(shape.numbers):
            name = f"{prefix}.experts.{number}"
            for matrix, place, dimension in (("gate", gate, 0), ("up", up, 0), ("down", each.down, 1)):
                parameter = whole(f"{name}.{matrix}_proj.{each.suffix}", place[expert])
                yield from cut([parameter], dimension, shape.width_share)
        if shape.shared:
            name = f"{prefix}.shared_experts"
            yield whole(f"{name}.gate_proj.{each.suffix}", joined_rows(gate[shape.routed :]))
            yield whole(f"{name}.up_proj.{each.suffix}", joined_rows(up[shape.routed :]))
            yield whole(f"{name}.down_proj.{each.suffix}", joined_columns(each.down[shape.routed :]))
