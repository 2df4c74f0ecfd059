"""Where the tokens of decode rows stand: what a step's layers read of them, from what is known of the rows."""

from typing import NamedTuple

import torch

from kernels.decode_rows import reference


class PlacedTokens(NamedTuple):
    """By token, row by row; the lengths by row."""

    # [tokens] int64: what is embedded.
    token_ids: torch.Tensor
    # [tokens, pairs] complex64
    rotations: torch.Tensor
    # [tokens] int64: places in the pool, block * 64 + offset.
    slots: torch.Tensor
    # [tokens] bool
    real: torch.Tensor
    # [rows] int32: tokens of each context, the row's own included.
    lengths: torch.Tensor


def place_tokens(
    token_ids: torch.Tensor,
    starts: torch.Tensor,
    block_table: torch.Tensor,
    real: torch.Tensor,
    rotations: torch.Tensor,
) -> PlacedTokens:
    """token_ids: [rows, n] int64, of which negative ones stand for no token and become 0 if n is more than 1; starts:
    [rows] int32, the position of each row's first token; block_table: [rows, blocks] int32, with room for all tokens;
    real: [rows] bool; rotations: [positions, pairs] complex64, of all positions. All contiguous but token_ids, and the
    table's rows. No rows give no tokens.
    """
    rows = token_ids.shape[0]
    assert starts.shape == real.shape == (rows,) and block_table.shape[0] == rows and block_table.stride(1) == 1
    assert token_ids.dtype == torch.int64 and starts.dtype == block_table.dtype == torch.int32
    assert starts.is_contiguous() and real.is_contiguous() and rotations.is_contiguous()
    given = token_ids, starts, block_table, real, rotations
    if token_ids.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.decode_rows import triton

        return PlacedTokens(*triton.place_tokens(*given))
    return PlacedTokens(*reference.place_tokens(*given))
