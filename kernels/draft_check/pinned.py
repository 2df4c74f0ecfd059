"""Drafts that count as right as often as a measurement says: modules of random weights guess nothing right."""

from collections.abc import Sequence

import torch

from kernels.decode_rows import NO_TOKEN

# The decisions repeat after this many steps.
STEPS = 512
# A point moves by the golden ratio from step to step, and by another irrational number from row to row.
STEP_SHIFT, ROW_SHIFT = 0.6180339887498949, 0.4142135623730951


class PinnedAcceptance:
    """Decides on the device how many drafts, from the left, count as right.

    Each step of a row has a point; the points are spread evenly over [0, 1) (a Kronecker sequence). The drafts whose
    share is above the step's point are right. The shares are therefore met within a few steps, and all ranks of a TP
    group accept the same drafts.
    """

    def __init__(self, shares: Sequence[float], most: int, rows: int, device: torch.device) -> None:
        """shares: see `set`. most: most drafts of a row; rows: most rows of a step."""
        self._most = most
        steps, lines = torch.arange(STEPS).double().unsqueeze(1), torch.arange(rows).double()
        self._points = ((steps * STEP_SHIFT + lines * ROW_SHIFT) % 1).to(device)
        # [steps, rows]; captured graphs read these two.
        self._right = torch.zeros(STEPS, rows, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self.set(shares)

    def set(self, shares: Sequence[float]) -> None:
        """Set the shares of rows whose first draft is right, whose first two are, and so on; later ones are wrong."""
        right = torch.zeros_like(self._right)
        for share in shares[: self._most]:
            right += self._points < share
        self._right.copy_(right)

    def count(self, right: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """How many drafts of each row count as right: [rows] int64. Each call counts as the next step.

        right: [rows] int64, how many are: tokens of a prompt that are verified like drafts, at least. drafts: [rows, n]
        int64, NO_TOKEN where there are fewer.
        """
        pinned = self._right.index_select(0, self._step)[0, : len(drafts)]
        self._step.add_(1).remainder_(STEPS)
        return torch.maximum(right, torch.minimum(pinned, (drafts != NO_TOKEN).sum(1)))
