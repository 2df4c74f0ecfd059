"""Rows that decode, on the device: which tokens each row computes, given what the row that it follows yielded, and
where these tokens lie.
"""

from typing import NamedTuple

import torch

from kernels.decode_rows import reference

# NO_TOKEN stands for no token: no draft equals it. A row that only fills up a graph has FILLER in place of the row that
# it follows. A row of the batch that follows none has any other negative number.
NO_TOKEN, FILLER = reference.NO_TOKEN, reference.FILLER


class FollowedRows(NamedTuple):
    """What each row computes."""

    # [rows, 1 + n] int64; NO_TOKEN where a row has no draft.
    token_ids: torch.Tensor
    # [rows] int32: the position of the first token.
    starts: torch.Tensor
    # [rows] bool: whether it is a row of the batch.
    real: torch.Tensor


class PlacedTokens(NamedTuple):
    """The tokens of all rows, one row after another, and the length of each row's context."""

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


def follow_rows(
    given: torch.Tensor,
    follows: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    drawn: torch.Tensor,
    missing: torch.Tensor,
    guessed: torch.Tensor,
    shared: torch.Tensor,
    block_table: torch.Tensor,
    rotations: torch.Tensor,
    padding_slot: int,
) -> tuple[FollowedRows, PlacedTokens]:
    """A row that follows none has its given tokens. Another one has the last token that the row before yielded, and the
    first of the guesses after it; it begins where that row ended. What it computes, and `place_tokens` of that.

    given: [rows, 1 + n] int32; follows: [rows] int32, the row before, or negative; positions: [rows] int32, where a row
    begins if the one before yielded all that it could; drafts: [rows] int32, how many of n each has. By row before:
    drawn, [most rows] int64, its last token; missing, [most rows] int32, how many tokens fewer it yielded; guessed,
    [most rows, n or more] int64. The others as `place_tokens` takes them. All contiguous but the table's rows.
    """
    assert given.dtype == follows.dtype == positions.dtype == drafts.dtype == missing.dtype == torch.int32
    assert drawn.dtype == guessed.dtype == torch.int64 and guessed.shape[1] >= given.shape[1] - 1
    tensors = given, follows, positions, drafts, drawn, missing, guessed
    assert all(each.is_contiguous() for each in tensors)
    if given.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.decode_rows import triton

        followed, placed = triton.follow_rows(*tensors, shared, block_table, rotations, padding_slot)
        return FollowedRows(*followed), PlacedTokens(*placed)
    rows = FollowedRows(*reference.follow_rows(*tensors))
    return rows, place_tokens(rows.token_ids, rows.starts, block_table, rows.real, shared, rotations, padding_slot)


def place_tokens(
    token_ids: torch.Tensor,
    starts: torch.Tensor,
    block_table: torch.Tensor,
    real: torch.Tensor,
    shared: torch.Tensor | None,
    rotations: torch.Tensor,
    padding_slot: int,
) -> PlacedTokens:
    """token_ids: [rows, n] int64, of which negative ones stand for no token and become 0 if n is more than 1; starts:
    [rows] int32, the position of each row's first token; block_table: [rows, blocks] int32, with room for all tokens;
    real: [rows] bool; shared: [rows] int32, how many of the first tokens have KV already: what is written for these
    goes to `padding_slot`; None if no token has. rotations: [positions, pairs] complex64, of all positions. All
    contiguous but token_ids, and the table's rows. No rows give no tokens.
    """
    rows = token_ids.shape[0]
    assert starts.shape == real.shape == (rows,) and block_table.shape[0] == rows and block_table.stride(1) == 1
    assert token_ids.dtype == torch.int64 and starts.dtype == block_table.dtype == torch.int32
    assert starts.is_contiguous() and real.is_contiguous() and rotations.is_contiguous()
    assert shared is None or (shared.shape == (rows,) and shared.dtype == torch.int32 and shared.is_contiguous())
    given = token_ids, starts, block_table, real, shared, rotations, padding_slot
    if token_ids.is_cuda:
        from kernels.decode_rows import triton

        return PlacedTokens(*triton.place_tokens(*given))
    return PlacedTokens(*reference.place_tokens(*given))
