"""What is guessed behind a step's draws, on the device.

Made of tensors alone, so that a graph can capture it.
"""

import torch

from engine.model.context import DeviceState
from engine.model.decode_inputs import DecodeRows
from engine.model.inputs import decode_context
from engine.model.model import Model
from kernels.decode_rows import NO_TOKEN
from kernels.sample import greedy


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
