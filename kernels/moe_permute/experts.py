"""What experts made of tokens, before it is added up."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertOutputs:
    """Of each token a sum, not made yet: its experts' rows, each times its weight."""

    # [..., width] contiguous, leading dimensions those of the layout.
    rows: torch.Tensor
    # [tokens, k] int64: the rows of each token, as `expand` or the layout has them.
    positions: torch.Tensor
    # [tokens, k] float32.
    weights: torch.Tensor

    def __post_init__(self) -> None:
        assert self.positions.shape == self.weights.shape and self.rows.is_contiguous()
        assert self.positions.is_contiguous() and self.weights.is_contiguous() and self.weights.dtype == torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums: [tokens, width]."""
        return self.positions.shape[0], self.rows.shape[-1]

    def __getitem__(self, tokens: torch.Tensor) -> "ExpertOutputs":
        """Of some tokens, as of a tensor of the sums: int64 indices."""
        return ExpertOutputs(self.rows, self.positions[tokens], self.weights[tokens])
