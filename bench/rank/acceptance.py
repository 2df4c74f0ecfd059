"""Drafts that are accepted as often as a bench says, because modules of random weights guess nothing right."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias
from unittest import mock

import torch

from kernels.decode_rows import NO_TOKEN

# Drafts of a row.
NextN: TypeAlias = int | Literal["auto"]
# Shares of rows whose first draft is right, whose first two are, and so on.
Shares: TypeAlias = tuple[float, ...]
# Defaults: as published for R1, and as of a module that is run again for each guess without being trained for that.
ACCEPTANCE: Sequence[Shares] = ((0.85, 0.72, 0.61), (0.8, 0.4, 0.2))
# The decisions repeat after this many steps.
STEPS = 512
# A point moves by the golden ratio from step to step, and by another irrational number from row to row.
STEP_SHIFT, ROW_SHIFT = 0.6180339887498949, 0.4142135623730951


def parse_next_n(text: str) -> NextN:
    return "auto" if text == "auto" else int(text)


def parse_shares(text: str) -> Shares:
    return tuple(map(float, text.split(",")))


class InjectedAcceptance:
    """Decides on the device how many drafts, from the left, are right, in place of the engine's `count_accepted`.

    Each step of a row has a point; the points are spread evenly over [0, 1) (a Kronecker sequence). The drafts whose
    share is above the step's point are right. The shares are therefore met within a few steps, and all ranks of a TP
    group accept the same drafts.
    """

    def __init__(self, most: int, rows: int, device: torch.device) -> None:
        """most: most drafts of a row; rows: most rows of a step. No draft is right before `set`."""
        self._most = most
        steps, lines = torch.arange(STEPS).double().unsqueeze(1), torch.arange(rows).double()
        self._points = ((steps * STEP_SHIFT + lines * ROW_SHIFT) % 1).to(device)
        # [steps, rows]; captured graphs read these two.
        self._right = torch.zeros(STEPS, rows, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)

    def set(self, shares: Sequence[float]) -> None:
        """Set the shares of right drafts by place. Drafts at later places are wrong."""
        right = torch.zeros_like(self._right)
        for share in shares[: self._most]:
            right += self._points < share
        self._right.copy_(right)

    def count_accepted(self, drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """As `kernels.draft_check.count_accepted`. Each call counts as the next step."""
        right = self._right.index_select(0, self._step)[0, : len(drawn)]
        self._step.add_(1).remainder_(STEPS)
        return torch.minimum(right, (drafts != NO_TOKEN).sum(1))

    @contextmanager
    def injected(self) -> Iterator[None]:
        with (
            mock.patch("engine.drafts.graph.count_accepted", self.count_accepted),
            mock.patch("engine.drafts.draft_pass.count_accepted", self.count_accepted),
        ):
            yield
