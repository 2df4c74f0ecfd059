"""Matrices in INT4 that other tools pack into int32, eight weights an item. They are dequantized when they are read, or
multiplied as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

PER_ITEM, BITS = 8, 4
# The integer that compressed-tensors packs for a weight of 0, and the highest bits of two integers.
OFFSET, SIGN_BITS = 8, -0x78
# GPTQ packs zero points less one.
GPTQ_ZERO = 1
# AWQ's nibbles hold columns 0, 2, 4, 6, 1, 3, 5, 7 of eight, from the lowest on: these are the nibbles of the columns.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a tool names and lays out a matrix [outputs, inputs] in groups of inputs.

    compressed-tensors packs [outputs, inputs / 8], with scales [outputs, groups]. AWQ packs [inputs, outputs / 8] in an
    order of its own, GPTQ [inputs / 8, outputs]; both with scales [groups, outputs] and zeros [groups, outputs / 8].
    The sources are the packages compressed-tensors, AutoAWQ and GPTQModel.
    """

    tool: Literal["compressed-tensors", "AWQ", "GPTQ"]
    # What the tensors' names end in, after the matrix's module.
    weight: str
    scales: str
    zeros: str | None = None
    # What is there and not read.
    unread: tuple[str, ...] = ()

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """stored: the shape of what is packed. Returns (outputs, inputs)."""
        first, second = stored
        match self.tool:
            case "compressed-tensors":
                return first, second * PER_ITEM
            case "AWQ":
                return second * PER_ITEM, first
            case "GPTQ":
                return second, first * PER_ITEM

    def companions(self, module: str) -> Iterator[str]:
        """Names of the tensors without which it cannot be dequantized, the scales first."""
        yield f"{module}.{self.scales}"
        if self.zeros is not None:
            yield f"{module}.{self.zeros}"

    @property
    def is_kept(self) -> bool:
        """Whether its integers can be multiplied as they are: rows are the matrix's, and there are no zero points."""
        return self.tool == "compressed-tensors"

    def int4(self, packed: torch.Tensor) -> torch.Tensor:
        """packed: rows of a matrix, if `is_kept`. Returns [rows, inputs / 2] int8: two signed integers a byte, the
        first in the low half. OFFSET inverted the highest bit of each, and no other.
        """
        assert self.is_kept
        return packed.view(torch.int8) ^ SIGN_BITS

    def dequantize(self, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """Tensors as they are stored. Returns [outputs, inputs] float32."""
        match self.tool:
            case "compressed-tensors":
                values = (_nibbles(packed).flatten(1) - OFFSET).float()
                return _scaled(values, scales)
            case "AWQ":
                assert zeros is not None
                integers, points = (_nibbles(each)[:, :, list(AWQ_NIBBLES)].flatten(1) for each in (packed, zeros))
            case "GPTQ":
                assert zeros is not None
                integers = _nibbles(packed).transpose(1, 2).flatten(0, 1)
                points = _nibbles(zeros).flatten(1) + GPTQ_ZERO
        group = len(integers) // len(points)
        return _scaled((integers - points.repeat_interleave(group, 0)).float().t().contiguous(), scales.t())


COMPRESSED = Packing("compressed-tensors", "weight_packed", "weight_scale", unread=("weight_shape",))
AWQ = Packing("AWQ", "qweight", "scales", "qzeros")
GPTQ = Packing("GPTQ", "qweight", "scales", "qzeros", unread=("g_idx",))


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[rows, items] int32 to [rows, items, 8] int32 from 0 to 15, the lowest bits first."""
    shifts = torch.arange(0, PER_ITEM * BITS, BITS, dtype=torch.int32, device=packed.device)
    return (packed.unsqueeze(2) >> shifts) & 15


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """values: [outputs, inputs] float32, overwritten; scales: [outputs, groups] of any float dtype."""
    values.unflatten(1, (scales.shape[1], -1)).mul_(scales.float().unsqueeze(2))
    return values
