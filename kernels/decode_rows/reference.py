"""Places of decode rows' tokens in plain torch: the definition."""

import torch

from kernels.kv_copy import BLOCK_TOKENS


def place_tokens(
    token_ids: torch.Tensor,
    starts: torch.Tensor,
    block_table: torch.Tensor,
    real: torch.Tensor,
    rotations: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    count = token_ids.shape[1]
    positions, flat = starts.unsqueeze(1), token_ids.flatten()
    if count > 1:
        positions = positions + torch.arange(count, dtype=torch.int32, device=starts.device)
        flat, real = flat.clamp(min=0), real.repeat_interleave(count)
    block = block_table.gather(1, (positions // BLOCK_TOKENS).long())
    slots = (block * BLOCK_TOKENS + positions % BLOCK_TOKENS).long().flatten()
    return flat, rotations.index_select(0, positions.flatten()), slots, real, starts + count
