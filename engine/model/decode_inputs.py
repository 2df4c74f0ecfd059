"""Rows of one token each, or of one token and equally many drafts, as one small integer array that goes to the device
in one copy. Tokens of a prompt may stand in place of drafts.

The rows' first tokens, slots, context lengths and rotations are computed from it there, so that a captured graph needs
no other input.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Row
from engine.model.context import DeviceState
from kernels.decode_rows import FILLER, NO_TOKEN, PlacedTokens, follow_rows, place_tokens
from mesh.blocks import BLOCK_TOKENS

# Stands for None where a row follows no other, since tensors have no None.
NO_ROW = -1
# What a row has in addition to its tokens: the row that it follows, its position, how many drafts and shared tokens it
# has, and whether its prompt goes on in a later row.
FIELDS = 5


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of equally many tokens, all of which are on the device."""

    # [rows, tokens] int64; NO_TOKEN where a row has no draft: what is computed there is never read.
    token_ids: torch.Tensor
    # [rows] int32: the position of the first token.
    starts: torch.Tensor
    # [rows, blocks] int32, with room for all tokens.
    block_table: torch.Tensor
    # [rows] bool: whether it is a row of the batch. Others fill a graph up.
    real: torch.Tensor
    # [rows] int32: how many of the first tokens have KV already, which is not written again. None if no row has any.
    shared: torch.Tensor | None = None
    # Where the tokens lie, if that is known.
    known_places: PlacedTokens | None = None

    @property
    def rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def row_tokens(self) -> int:
        return self.token_ids.shape[1]

    def placed(self, state: DeviceState) -> PlacedTokens:
        if self.known_places is not None:
            return self.known_places
        padding_slot = state.padding_block * BLOCK_TOKENS
        own = self.token_ids, self.starts, self.block_table, self.real, self.shared
        return place_tokens(*own, state.rotations, padding_slot)

    def blocks_of(self, positions: torch.Tensor) -> torch.Tensor:
        """[rows] int64: the block of one position in each row."""
        return self.block_table.gather(1, (positions // BLOCK_TOKENS).long().unsqueeze(1)).squeeze(1).long()


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Views of the packed array on the device, all int32."""

    # [rows, tokens]: the row's tokens if it follows no row. If it does, its tokens are what that row of the last batch
    # drew and guessed.
    given: torch.Tensor
    # These five are [rows]. Which row it follows: NO_ROW if none, FILLER if the row only fills up a graph.
    follows: torch.Tensor
    # Where the row begins if the one that it follows yields all that it can.
    positions: torch.Tensor
    # How many of the tokens after the first are drafts, or take the place of drafts.
    drafts: torch.Tensor
    # See DecodeRows.
    shared: torch.Tensor
    # 1 if a later row goes on with its prompt. The KV of guesses after it is not written: no step follows them.
    goes_on: torch.Tensor
    # [rows, blocks]
    block_table: torch.Tensor

    def known(self, state: DeviceState) -> DecodeRows:
        """The rows, in which what the batch before drew and guessed is filled in."""
        own, padding_slot = (self.given, self.follows, self.positions, self.drafts), state.padding_block * BLOCK_TOKENS
        before, lying = (state.drawn, state.missing, state.guessed), (self.shared, self.block_table, state.rotations)
        rows, places = follow_rows(*own, *before, *lying, padding_slot)
        return DecodeRows(rows.token_ids, rows.starts, self.block_table, rows.real, self.shared, places)


def packed_size(rows: int, blocks: int, drafts: int = 0) -> int:
    """Integers of the packed array."""
    return rows * (FIELDS + 1 + drafts + blocks)


def pack_decode_rows(
    rows: Sequence[Row], padded_rows: int, blocks: int, padding_block: int, drafts: int = 0, earlier: int = 0
) -> npt.NDArray[np.int32]:
    """`padded_rows` rows of up to `blocks` blocks and 1 + `drafts` tokens. Rows after `rows` lie in `padding_block`,
    and so do blocks that a row lacks. The prompts of the first `earlier` rows go on in later ones.
    """
    packed = np.zeros(packed_size(padded_rows, blocks, drafts), np.int32)
    first, second = _bounds(padded_rows, drafts)
    follows, positions, drafted, shared, goes_on = packed[:first].reshape(FIELDS, padded_rows)
    given = packed[first:second].reshape(padded_rows, 1 + drafts)
    table = packed[second:].reshape(padded_rows, blocks)
    follows[: len(rows)], follows[len(rows) :] = NO_ROW, FILLER
    goes_on[:earlier] = 1
    given[:, 1:] = NO_TOKEN
    table.fill(padding_block)
    for index, row in enumerate(rows):
        if row.follows is None:
            given[index, : len(row.token_ids)] = row.token_ids
        else:
            follows[index] = row.follows
        positions[index] = row.start
        drafted[index] = row.drafts
        if row.shared:
            shared[index] = row.shared
        count = min(len(row.block_ids), blocks)
        table[index, :count] = row.block_ids[:count]
    return packed


def unpack_decode_rows(packed: torch.Tensor, rows: int, drafts: int = 0) -> DecodeInputs:
    first, second = _bounds(rows, drafts)
    follows, positions, drafted, shared, goes_on = packed[:first].view(FIELDS, rows)
    given = packed[first:second].view(rows, 1 + drafts)
    return DecodeInputs(given, follows, positions, drafted, shared, goes_on, packed[second:].view(rows, -1))


def _bounds(rows: int, drafts: int) -> tuple[int, int]:
    """Where tokens begin, after the fields, and where block tables begin, after the tokens."""
    return FIELDS * rows, (FIELDS + 1 + drafts) * rows
