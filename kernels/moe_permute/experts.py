"""The outputs of experts before they are added up."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.structures import structure

ExpertSum = structure(Path(__file__).parent.parent / "cuda" / "expert_sum.cuh", "ExpertSum")


@dataclass(frozen=True, slots=True)
class ExpertOutputs:
    """A sum for each token, not computed yet: its experts' rows, each times its weight, and a shared one."""

    # [..., width] contiguous; the leading dimensions are those of the layout.
    rows: torch.Tensor
    # [tokens, k] int64: the rows of each token, from `expand` or from the layout; NOWHERE adds nothing.
    positions: torch.Tensor
    # [tokens, k] float32.
    weights: torch.Tensor
    # [tokens, width] of the rows' dtype, contiguous: added as well, by shared experts that are a layer of their own.
    shared: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.positions.shape == self.weights.shape and self.rows.is_contiguous()
        assert self.positions.is_contiguous() and self.weights.is_contiguous() and self.weights.dtype == torch.float32
        if self.shared is not None:
            assert self.shared.shape == self.shape and self.shared.is_contiguous()
            assert self.shared.dtype == self.rows.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the sums: [tokens, width]."""
        return self.positions.shape[0], self.rows.shape[-1]

    def __getitem__(self, tokens: torch.Tensor) -> "ExpertOutputs":
        """Select tokens by int64 indices, as if this were the tensor of sums."""
        shared = None if self.shared is None else self.shared[tokens]
        return ExpertOutputs(self.rows, self.positions[tokens], self.weights[tokens], shared)


def expert_sum(outputs: ExpertOutputs) -> ctypes.Structure:
    """`ExpertSum`, as CUDA kernels that add the outputs up take it."""
    return ExpertSum(
        rows=outputs.rows.data_ptr(),
        positions=outputs.positions.data_ptr(),
        weights=outputs.weights.data_ptr(),
        shared=None if outputs.shared is None else outputs.shared.data_ptr(),
    )
