"""The draft layers of a step's known tokens: each MTP module computes them after the one before it.

Module k reads a token with the state that module k - 1 made of the token before it. For a row's first token that state
comes from the step that computed the token before: it lies in `DeviceState.draft_states`, by that token's block. All of
this is tensors alone, so that a graph can capture it.
"""

from typing import NamedTuple

import torch

from engine.model.context import DeviceState, ForwardContext
from engine.model.decode_inputs import DecodeRows
from engine.model.inputs import decode_context
from engine.model.model import Model
from kernels.decode_rows import NO_TOKEN
from kernels.draft_check import count_accepted
from kernels.sample import greedy


class RowEnds(NamedTuple):
    """By row, [rows] int64: the index of its first token, and the block of the token before that (`no_block` if nothing
    comes before); the index of its last known token, and the block of that token.
    """

    first: torch.Tensor
    block_before: torch.Tensor
    last: torch.Tensor
    last_block: torch.Tensor


def no_block(state: DeviceState) -> int:
    """Stands for the block of the token before the first of a prompt."""
    return state.padding_block + 1


def accepted_drafts(state: DeviceState, drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """As `count_accepted`, unless shares of right drafts are pinned."""
    right = count_accepted(drawn, drafts)
    return right if state.pinned is None else state.pinned.count(right, drafts)


def compute_draft_layers(
    model: Model, state: DeviceState, before: torch.Tensor, context: ForwardContext, ends: RowEnds | None
) -> torch.Tensor:
    """Write the KV of all draft layers; return what the first module makes of the tokens: [tokens, hidden].

    before: the model's states of the tokens before those in `context`, [tokens, hidden]; ends: None if there is one
    module.
    """
    states = made = model.draft(0, before, context)
    for module in range(1, model.config.draft_layers):
        assert ends is not None and state.draft_states is not None
        kept = state.draft_states[module - 1]
        before = made.roll(1, 0)
        before[ends.first] = kept[ends.block_before]
        kept[ends.last_block] = made[ends.last]
        made = model.draft(module, before, context)
    return states


def guess(
    model: Model,
    state: DeviceState,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    real: torch.Tensor,
    count: int,
    unwritten: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens that may follow each row's last one: [rows, count] int64.

    Each module reads the guess of the module before it and the state that that module made of its token. The last
    module then runs on its own output, until all guesses are made.

    hidden: [rows, hidden], what the first module made of the last tokens; positions: [rows] int32, theirs;
    block_table: [rows, blocks], with room for all guesses but one; real: see DecodeRows.
    unwritten: [rows] int32, 1 for rows whose guesses' KV is not written; None if there are none.
    """
    last = model.config.draft_layers - 1
    guesses: list[torch.Tensor] = []
    for number in range(count):
        if number:
            rows = DecodeRows(guesses[-1].unsqueeze(1), positions + number, block_table, real, unwritten)
            hidden = model.draft(min(number, last), hidden, decode_context(rows, state))
        guesses.append(greedy(model.logits(hidden)))
    if not guesses:
        return positions.new_zeros(len(positions), 0, dtype=torch.int64)
    return guesses[0].unsqueeze(1) if count == 1 else torch.stack(guesses, dim=1)


def note_guesses(state: DeviceState, rows: torch.Tensor | slice, guesses: torch.Tensor) -> None:
    """Keep the guesses for rows that follow these. rows: their indices in the step."""
    count = guesses.shape[1]
    state.guessed[rows, :count] = guesses
    if count < state.most_drafts:
        state.guessed[rows, count:] = NO_TOKEN
