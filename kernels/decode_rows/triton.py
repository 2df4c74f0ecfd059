"""Places of decode rows' tokens in Triton: one launch in place of some fifteen."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier
from kernels.kv_copy import BLOCK_TOKENS


# A program does one token. Reads and writes a rotation, 8 bytes a pair, and some 30 bytes besides.
@triton.jit
def _place_tokens(
    token_ids, starts, block_table, real, rotations,
    out_ids, out_rotations, out_slots, out_real, lengths, row_stride, token_stride, table_stride,
    TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    row, place = token // TOKENS, token % TOKENS
    start = tl.load(starts + row)
    position = start.to(tl.int64) + place
    token_id = tl.load(token_ids + row * row_stride + place * token_stride)
    if TOKENS > 1:
        token_id = tl.maximum(token_id, 0)
    block = tl.load(block_table + row * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    tl.store(out_ids + token, token_id)
    tl.store(out_slots + token, block * BLOCK_TOKENS + position % BLOCK_TOKENS)
    tl.store(out_real + token, tl.load(real + row))
    if place == 0:
        tl.store(lengths + row, start + TOKENS)
    value = tl.arange(0, PADDED)
    rotation = tl.load(rotations + position * VALUES + value, mask=value < VALUES)
    tl.store(out_rotations + token * VALUES + value, rotation, mask=value < VALUES)


def place_tokens(
    token_ids: torch.Tensor,
    starts: torch.Tensor,
    block_table: torch.Tensor,
    real: torch.Tensor,
    rotations: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    (rows, count), device = token_ids.shape, token_ids.device
    tokens, pairs = rows * count, rotations.shape[1]
    ids, slots = (torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(2))
    turns = torch.empty(tokens, pairs, dtype=rotations.dtype, device=device)
    belongs = torch.empty(tokens, dtype=torch.bool, device=device)
    lengths = torch.empty_like(starts)
    if tokens:
        _place_tokens[(tokens,)](
            token_ids, starts, block_table, real.view(torch.uint8), torch.view_as_real(rotations),
            ids, torch.view_as_real(turns), slots, belongs.view(torch.uint8), lengths,
            *token_ids.stride(), block_table.stride(0),
            count, BLOCK_TOKENS, 2 * pairs, triton.next_power_of_2(2 * pairs), num_warps=1,
            **dependent_launch(device),
        )  # fmt: skip
    return ids, turns, slots, belongs, lengths
