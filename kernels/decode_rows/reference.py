"""Decode rows in plain torch: the definition."""

import torch

from kernels.kv_copy import BLOCK_TOKENS

NO_TOKEN, FILLER = -1, -2


def follow_rows(
    given: torch.Tensor,
    follows: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    drawn: torch.Tensor,
    missing: torch.Tensor,
    guessed: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    leads, source = follows < 0, follows.clamp(min=0).long()
    followed, count = drawn.index_select(0, source).unsqueeze(1), given.shape[1] - 1
    if count:
        places = torch.arange(count, device=given.device)
        guesses = guessed.index_select(0, source)[:, :count]
        followed = torch.cat((followed, guesses.masked_fill(places >= drafts.unsqueeze(1), NO_TOKEN)), dim=1)
    starts = positions - missing.index_select(0, source).masked_fill(leads, 0)
    return torch.where(leads.unsqueeze(1), given.long(), followed), starts, follows != FILLER


def place_tokens(
    token_ids: torch.Tensor,
    starts: torch.Tensor,
    block_table: torch.Tensor,
    real: torch.Tensor,
    shared: torch.Tensor | None,
    rotations: torch.Tensor,
    padding_slot: int,
) -> tuple[torch.Tensor, ...]:
    count = token_ids.shape[1]
    positions, flat = starts.unsqueeze(1), token_ids.flatten()
    if count > 1:
        positions = positions + torch.arange(count, dtype=torch.int32, device=starts.device)
        flat, real = flat.clamp(min=0), real.repeat_interleave(count)
    block = block_table.gather(1, (positions // BLOCK_TOKENS).long())
    slots = (block * BLOCK_TOKENS + positions % BLOCK_TOKENS).long()
    if shared is not None:
        known = torch.arange(count, device=starts.device) < shared.unsqueeze(1)
        slots = slots.masked_fill(known, padding_slot)
    return flat, rotations.index_select(0, positions.flatten()), slots.flatten(), real, starts + count
