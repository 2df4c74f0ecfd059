"""Checks of drafts in plain torch: the definition."""

import torch


def count_accepted(drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    return (drawn[:, :-1] == drafts).long().cumprod(1).sum(1)


def settle(
    accepted: torch.Tensor,
    drawn: torch.Tensor,
    first: torch.Tensor,
    starts: torch.Tensor,
    drafts: torch.Tensor,
    rows: torch.Tensor | None,
    last_drawn: torch.Tensor,
    missing: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    written = slice(0, len(accepted)) if rows is None else rows
    last_drawn[written] = drawn.gather(1, accepted.unsqueeze(1)).squeeze(1)
    count = accepted.int()
    missing[written] = drafts - count
    return first + accepted, starts + count
