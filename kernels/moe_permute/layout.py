"""Where the copies of tokens lie for the experts' matrix products. The device computes it and keeps it."""

from dataclasses import dataclass

import torch

from kernels.act_quant.quantized import Quantized

# Rows of a contiguous layout that belong to no expert.
PADDING = -1
# The position of a choice that has no row, because its expert lies elsewhere.
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class ContiguousLayout:
    """Rows sorted by expert, each expert's first row a multiple of the alignment; for many tokens."""

    # [tokens, k] int64: the row of each token and choice, or NOWHERE.
    positions: torch.Tensor
    # [rows] int32: each row's expert, ascending, or PADDING. The number of rows does not depend on the choice.
    row_experts: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor in this layout, without its width."""
        return (self.row_experts.shape[0],)


@dataclass(frozen=True, slots=True)
class MaskedLayout:
    """Each expert has `capacity` rows, of which the first counts[expert] are used; for few tokens."""

    # [tokens, k] int64: the row of each token and choice, expert * capacity + index, or NOWHERE.
    positions: torch.Tensor
    # [experts] int32.
    counts: torch.Tensor
    # At least the number of tokens, so that no choice overflows it.
    capacity: int
    # The number of shared experts, the last ones, which every token has.
    shared: int = 0
    # How many more experts tokens may choose, which lie elsewhere and have no rows here.
    elsewhere: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor in this layout, without its width."""
        return (self.counts.shape[0], self.capacity)

    @property
    def expected_rows(self) -> int:
        """The rows of an expert that is not shared if all are chosen equally often."""
        tokens, choices = self.positions.shape
        return expected_rows(tokens, choices, self.counts.shape[0] + self.elsewhere, self.shared)

    @property
    def expected_copies(self) -> float:
        """How many copies of tokens come here if all experts are chosen equally often."""
        experts = self.counts.shape[0]
        return self.positions.numel() * experts / (experts + self.elsewhere)


# Numbers in front of an expert's tokens in a plan, and the most tokens.
HEADER, MOST_LISTED = 4, 32
PLAN_WIDTH = HEADER + MOST_LISTED


@dataclass(frozen=True, slots=True)
class ListedRows:
    """Rows in order of their experts, which read the tokens where these are; for up to MOST_LISTED tokens."""

    # [tokens, k] int64: the row of each token and choice, or NOWHERE.
    positions: torch.Tensor
    # [experts, PLAN_WIDTH] int32. For each expert with rows, shared ones first: its number, its first row, the row
    # after its last one, one number without meaning, then its tokens. Further entries have zeros instead of these four.
    plan: torch.Tensor


Layout = ContiguousLayout | MaskedLayout


def expected_rows(tokens: int, choices: int, experts: int, shared: int) -> int:
    """The rows of an expert that is not shared if all are chosen equally often.

    choices and experts include shared ones, and experts those elsewhere.
    """
    return -(-tokens * (choices - shared) // (experts - shared))


@dataclass(frozen=True, slots=True)
class ExpandedQuantized:
    """A copy of each token for each of its experts, in a layout."""

    # [rows, width] or [experts, capacity, width]. Unused rows are undefined.
    rows: Quantized
    layout: Layout

    @property
    def positions(self) -> torch.Tensor:
        return self.layout.positions
