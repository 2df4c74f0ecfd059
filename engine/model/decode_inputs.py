"""Rows of one token each, as one small integer array that goes to the device in one copy.

Slots, context lengths and rotations are computed from it there, so that a captured graph needs no other input.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Row
from mesh.blocks import BLOCK_TOKENS

# Stands for no row, since tensors have no None.
NO_ROW = -1
# Each row has a token, the row it follows, and a position.
FIELDS = 3


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Views of the packed array on the device, all int32."""

    # [rows]: the input token if `follows` is NO_ROW; else the token is the one that row of the batch before drew.
    given: torch.Tensor
    follows: torch.Tensor
    positions: torch.Tensor
    # [rows, blocks]
    block_table: torch.Tensor

    def token_ids(self, drawn: torch.Tensor) -> torch.Tensor:
        """[rows] int64. drawn: [rows of the batch before] int64."""
        followed = drawn.index_select(0, self.follows.clamp(min=0).long())
        return torch.where(self.follows == NO_ROW, self.given.long(), followed)

    def slots(self) -> torch.Tensor:
        """[rows] int64."""
        block = self.block_table.gather(1, (self.positions // BLOCK_TOKENS).long().unsqueeze(1)).squeeze(1)
        return (block * BLOCK_TOKENS + self.positions % BLOCK_TOKENS).long()

    def lengths(self) -> torch.Tensor:
        """[rows] int32: tokens of each context, the row's own included."""
        return self.positions + 1


def packed_size(rows: int, blocks: int) -> int:
    """Integers of the packed array."""
    return rows * (FIELDS + blocks)


def pack_decode_rows(rows: Sequence[Row], padded_rows: int, blocks: int, padding_block: int) -> npt.NDArray[np.int32]:
    """`padded_rows` rows of up to `blocks` blocks; those behind `rows` hold one token, in `padding_block`."""
    packed = np.zeros(packed_size(padded_rows, blocks), np.int32)
    given, follows, positions = packed[: FIELDS * padded_rows].reshape(FIELDS, padded_rows)
    table = packed[FIELDS * padded_rows :].reshape(padded_rows, blocks)
    follows.fill(NO_ROW)
    for index, row in enumerate(rows):
        if row.follows is None:
            given[index] = row.token_ids[0]
        else:
            follows[index] = row.follows
        positions[index] = row.start
        count = row.start // BLOCK_TOKENS + 1
        table[index, :count] = row.block_ids[:count]
    table[len(rows) :, 0] = padding_block
    return packed


def unpack_decode_rows(packed: torch.Tensor, rows: int) -> DecodeInputs:
    given, follows, positions = packed[: FIELDS * rows].view(FIELDS, rows)
    return DecodeInputs(given, follows, positions, packed[FIELDS * rows :].view(rows, -1))
