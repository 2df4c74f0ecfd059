"""What the adapter asks of the package's buffers, which differ from version to version."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

# In bfloat16, or in float8 with float32 scales, [rows, width / 128].
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a model's mixtures of experts send. The same on all ranks."""

    # Width of a row.
    hidden: int
    # How many experts all ranks have, with copies; each has equally many.
    experts: int
    # How many of them a row goes to.
    choices: int
    # The most rows of each rank at once.
    tokens: int


class Received(NamedTuple):
    """The rows of all ranks for which one of this rank's experts was chosen; perhaps others behind them."""

    rows: Rows
    # [rows, k] float32.
    weights: torch.Tensor
    # [rows, k], counted from this rank's first expert; -1 for other ranks' experts, and in other rows.
    choices: torch.Tensor
    # What `combine` needs.
    way_back: object


class Buffer(Protocol):
    """One rank's end. Every rank makes the same calls in the same order, with equally many rows."""

    def waits(self, tokens: int) -> bool:
        """Whether the host waits for the device when this rank dispatches so many rows: they cannot be captured."""
        ...

    def dispatch(self, rows: Rows, weights: torch.Tensor, choices: torch.Tensor) -> Received:
        """weights: [tokens, k] float32; choices: [tokens, k] of the package's dtype, -1 for none; both contiguous."""
        ...

    def combine(self, parts: torch.Tensor, way_back: object) -> torch.Tensor:
        """The sums of what ranks make of this rank's rows. parts: [received rows, hidden] bfloat16, contiguous."""
        ...
