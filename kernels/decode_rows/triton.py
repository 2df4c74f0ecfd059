"""Decode rows in Triton: one launch in place of some thirty.

Neither kernel is compiled again for other numbers of rows or drafts, nor for tensors that begin elsewhere.
"""

import torch
import triton
import triton.language as tl

from kernels.decode_rows.reference import FILLER, NO_TOKEN
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.kv_copy import BLOCK_TOKENS
from kernels.tile_sizes import next_power_of_2

# The most tokens of a row.
MOST_TOKENS = 8
FOLLOW_POINTERS = ["given", "follows", "positions", "drafts", "shared", "block_table", "drawn", "missing", "guessed"]
FOLLOW_POINTERS += ["rotations", "lengths"]
FOLLOW_SIZES = ["padding_slot", "table_stride", "guessed_stride", "tokens"]
PLACE_POINTERS = ["token_ids", "starts", "block_table", "real", "shared", "rotations", "lengths"]
PLACE_SIZES = ["padding_slot", "row_stride", "token_stride", "table_stride", "tokens"]


# A program does one row: some 30 bytes, and for each token 40 and a rotation, 8 bytes a pair.
@triton.jit(do_not_specialize=FOLLOW_SIZES, do_not_specialize_on_alignment=FOLLOW_POINTERS)
def _follow_rows(
    given, follows, positions, drafts, shared, block_table, drawn, missing, guessed, rotations,
    token_ids, starts, real, out_ids, out_rotations, out_slots, out_real, lengths,
    padding_slot, table_stride, guessed_stride, tokens,
    MOST: tl.constexpr, NO_TOKEN: tl.constexpr, FILLER: tl.constexpr, BLOCK_TOKENS: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    inside = place < tokens
    before = tl.load(follows + row)
    source = tl.maximum(before, 0).to(tl.int64)
    start = tl.load(positions + row) - tl.where(before < 0, 0, tl.load(missing + source))
    guess = tl.load(guessed + source * guessed_stride + place - 1, mask=inside & (place > 0), other=NO_TOKEN)
    guess = tl.where(place <= tl.load(drafts + row), guess, NO_TOKEN)
    followed = tl.where(place == 0, tl.load(drawn + source), guess)
    own = tl.load(given + row * tokens + place, mask=inside, other=NO_TOKEN).to(tl.int64)
    token_id = tl.where(before < 0, own, followed)
    belongs = (before != FILLER).to(tl.uint8)
    tl.store(token_ids + row * tokens + place, token_id, mask=inside)
    tl.store(starts + row, start)
    tl.store(real + row, belongs)
    # Where the tokens lie.
    target, position = row * tokens + place, start.to(tl.int64) + place
    block = tl.load(block_table + row * table_stride + position // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
    slot = tl.where(place < tl.load(shared + row), padding_slot, block * BLOCK_TOKENS + position % BLOCK_TOKENS)
    tl.store(out_ids + target, tl.where(tokens > 1, tl.maximum(token_id, 0), token_id), mask=inside)
    tl.store(out_slots + target, slot, mask=inside)
    tl.store(out_real + target, tl.zeros([MOST], tl.uint8) + belongs, mask=inside)
    tl.store(lengths + row, start + tokens)
    value = tl.arange(0, PADDED)[None, :]
    known = inside[:, None] & (value < VALUES)
    rotation = tl.load(rotations + position[:, None] * VALUES + value, mask=known, other=0.0)
    tl.store(out_rotations + target[:, None] * VALUES + value, rotation, mask=known)


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
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    (rows, count), device, pairs = given.shape, given.device, rotations.shape[1]
    assert count <= MOST_TOKENS
    token_ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    starts, real = torch.empty_like(positions), torch.empty(rows, dtype=torch.bool, device=device)
    placed = _empty_placed(rows, count, rotations)
    ids, turns, slots, belongs, lengths = placed
    if rows:
        launch(_follow_rows, (rows,), device,
            given, follows, positions, drafts, shared, block_table, drawn, missing, guessed,
            torch.view_as_real(rotations), token_ids, starts, real.view(torch.uint8), ids, torch.view_as_real(turns),
            slots, belongs.view(torch.uint8), lengths, padding_slot, block_table.stride(0), guessed.stride(0), count,
            MOST_TOKENS, NO_TOKEN, FILLER, BLOCK_TOKENS, 2 * pairs, next_power_of_2(2 * pairs), num_warps=1,
        )  # fmt: skip
    return (token_ids, starts, real), placed


def _empty_placed(rows: int, count: int, rotations: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tokens, device = rows * count, rotations.device
    ids, slots = (torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(2))
    turns = torch.empty(tokens, rotations.shape[1], dtype=rotations.dtype, device=device)
    belongs = torch.empty(tokens, dtype=torch.bool, device=device)
    return ids, turns, slots, belongs, torch.empty(rows, dtype=torch.int32, device=device)


# A program does one token. Reads and writes a rotation, 8 bytes a pair, and some 30 bytes besides.
@triton.jit(do_not_specialize=PLACE_SIZES, do_not_specialize_on_alignment=PLACE_POINTERS)
def _place_tokens(
    token_ids, starts, block_table, real, shared, rotations,
    out_ids, out_rotations, out_slots, out_real, lengths, padding_slot, row_stride, token_stride, table_stride, tokens,
    BLOCK_TOKENS: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr, SHARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    row, place = token // tokens, token % tokens
    start = tl.load(starts + row)
    position = start.to(tl.int64) + place
    token_id = tl.load(token_ids + row * row_stride + place * token_stride)
    if tokens > 1:
        token_id = tl.maximum(token_id, 0)
    block = tl.load(block_table + row * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    slot = block * BLOCK_TOKENS + position % BLOCK_TOKENS
    if SHARED:
        slot = tl.where(place < tl.load(shared + row), padding_slot, slot)
    tl.store(out_ids + token, token_id)
    tl.store(out_slots + token, slot)
    tl.store(out_real + token, tl.load(real + row))
    if place == 0:
        tl.store(lengths + row, start + tokens)
    value = tl.arange(0, PADDED)
    rotation = tl.load(rotations + position * VALUES + value, mask=value < VALUES)
    tl.store(out_rotations + token * VALUES + value, rotation, mask=value < VALUES)


def place_tokens(
    token_ids: torch.Tensor,
    starts: torch.Tensor,
    block_table: torch.Tensor,
    real: torch.Tensor,
    shared: torch.Tensor | None,
    rotations: torch.Tensor,
    padding_slot: int,
) -> tuple[torch.Tensor, ...]:
    (rows, count), pairs = token_ids.shape, rotations.shape[1]
    tokens, device = rows * count, token_ids.device
    placed = ids, turns, slots, belongs, lengths = _empty_placed(rows, count, rotations)
    if tokens:
        launch(_place_tokens, (tokens,), device,
            token_ids, starts, block_table, real.view(torch.uint8), starts if shared is None else shared,
            torch.view_as_real(rotations),
            ids, torch.view_as_real(turns), slots, belongs.view(torch.uint8), lengths,
            padding_slot, *token_ids.stride(), block_table.stride(0),
            count, BLOCK_TOKENS, 2 * pairs, next_power_of_2(2 * pairs), shared is not None, num_warps=1,
        )  # fmt: skip
    return placed
