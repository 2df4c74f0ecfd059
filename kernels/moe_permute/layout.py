"""Where the copies of tokens lie, for the experts' matrix products: computed, and kept, on the device."""

from dataclasses import dataclass

import torch

from kernels.act_quant.quantized import Quantized

# Rows of a contiguous layout that belong to no expert.
PADDING = -1


@dataclass(frozen=True, slots=True)
class ContiguousLayout:
    """Rows sorted by expert, each expert's first row a multiple of the alignment; for many tokens."""

    # [tokens, k] int64: the row of each token and choice.
    positions: torch.Tensor
    # [rows] int32: each row's expert, ascending, or PADDING. The number of rows does not depend on the choice.
    row_experts: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tensor in this layout, without its width."""
        return (self.row_experts.shape[0],)


@dataclass(frozen=True, slots=True)
class MaskedLayout:
    """For each expert `capacity` rows, of which the first counts[expert] are used; for few tokens."""

    # [tokens, k] int64: the row of each token and choice, expert * capacity + index.
    positions: torch.Tensor
    # [experts] int32.
    counts: torch.Tensor
    # At least the number of tokens, so that no choice overflows it.
    capacity: int
    # Of the experts, the last ones: they see every token.
    shared: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tensor in this layout, without its width."""
        return (self.counts.shape[0], self.capacity)

    @property
    def expected_rows(self) -> int:
        """Of an expert that is not shared, where the choice is even."""
        tokens, choices = self.positions.shape
        return expected_rows(tokens, choices, self.counts.shape[0], self.shared)


Layout = ContiguousLayout | MaskedLayout


def expected_rows(tokens: int, choices: int, experts: int, shared: int) -> int:
    """Of an expert that is not shared, where the choice is even; choices and experts: with the shared ones."""
    return -(-tokens * (choices - shared) // (experts - shared))


@dataclass(frozen=True, slots=True)
class ExpandedQuantized:
    """A copy of each token for each of its experts, in a layout."""

    # [rows, width] or [experts, capacity, width]: rows that no token has are undefined.
    rows: Quantized
    layout: Layout

    @property
    def positions(self) -> torch.Tensor:
        return self.layout.positions
