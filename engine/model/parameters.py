"""Where a module's tensors come from: checkpoint names to the memory that they are read into."""

from collections.abc import Iterator, Sequence

import torch

from kernels.block_quant import BLOCK
from kernels.fp8_gemm import BlockScaled, block_scaled

# A tensor's name in the checkpoint, and its place: perhaps a part of a fused matrix; of four dimensions where a matrix
# does not lie in one piece, [parts, rows of a part, parts, columns of a part].
NamedParameters = Iterator[tuple[str, torch.Tensor]]
# Widths that FP8 products take, alone and grouped by expert.
OUTPUTS_MULTIPLE = 64
EXPERT_OUTPUTS_MULTIPLE = 128


def published_shape(place: torch.Tensor) -> tuple[int, ...]:
    """In the checkpoint, of the tensor that belongs there."""
    if place.dim() < 4:
        return tuple(place.shape)
    return place.shape[:2].numel(), place.shape[2:].numel()


def joined_rows(parts: torch.Tensor) -> torch.Tensor:
    """The place of one matrix whose rows lie in parts: [parts, rows of a part, columns]."""
    return parts[0] if len(parts) == 1 else parts.unsqueeze(2)


def joined_columns(parts: torch.Tensor) -> torch.Tensor:
    """The place of one matrix whose columns lie in parts: [parts, rows, columns of a part]."""
    return parts[0] if len(parts) == 1 else parts.transpose(0, 1).unsqueeze(0)


class Allocator:
    """Makes uninitialised parameters of one dtype on one device.

    `fp8`: weights of linear layers stay in FP8 blocks, where their shapes allow.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, fp8: bool = False) -> None:
        self.dtype = dtype
        self.device = device
        self.fp8 = fp8

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def weight(self, *shape: int, parts: Sequence[int]) -> torch.Tensor | BlockScaled:
        """A linear layer's weight: shape [outputs, inputs] or [experts, outputs, inputs].

        parts: rows of the published matrices that it joins, whose blocks must not straddle two of them.
        """
        *experts, outputs, inputs = shape
        multiple = EXPERT_OUTPUTS_MULTIPLE if experts else OUTPUTS_MULTIPLE
        straddles = any(rows % BLOCK for rows in parts[:-1])
        if not self.fp8 or straddles or outputs % multiple or inputs % BLOCK:
            return self(*shape)
        values = self(*shape, dtype=torch.float8_e4m3fn)
        return block_scaled(values, self(*experts, -(-outputs // BLOCK), inputs // BLOCK, dtype=torch.float32))
