"""What becomes of a step's draws on the device: how many drafts are right, and what is guessed next.

Made of tensors alone, so that a graph can capture it.
"""

import torch

from engine.model.context import DeviceState
from engine.model.decode_inputs import NO_TOKEN, DecodeRows
from engine.model.inputs import decode_context
from engine.model.model import Model
from kernels.sample import greedy


def count_accepted(drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """How many drafts of each row equal the tokens drawn in their places, up to the first that does not: [rows] int64.

    drawn: [rows, 1 + n]; drafts: [rows, n], NO_TOKEN where there are fewer.
    """
    return (drawn[:, :-1] == drafts).long().cumprod(1).sum(1)


def guess(
    model: Model,
    state: DeviceState,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    real: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """The tokens that may follow each row's last one: [rows, count] int64.

    Each module reads the guess of the one before it and what that made of its token; the last is run as often as
    guesses are left, on its own. hidden: [rows, hidden], what the first module made of the last tokens; positions:
    [rows] int32, theirs; block_table: [rows, blocks], with room for all guesses but one; real: see DecodeRows.
    """
    last = model.config.draft_layers - 1
    guesses: list[torch.Tensor] = []
    for number in range(count):
        if number:
            rows = DecodeRows(guesses[-1].unsqueeze(1), positions + number, block_table, real)
            hidden = model.draft(min(number, last), hidden, decode_context(rows, state))
        guesses.append(greedy(model.logits(hidden)))
    return torch.stack(guesses, dim=1) if guesses else positions.new_zeros(len(positions), 0, dtype=torch.int64)


def note_yields(
    state: DeviceState,
    rows: torch.Tensor | slice,
    drawn: torch.Tensor,
    accepted: torch.Tensor,
    drafts: torch.Tensor,
    guesses: torch.Tensor,
) -> None:
    """For rows that follow these: what they yield. rows: their indices in the step; drafts: [rows], how many each had;
    the others as above.
    """
    state.drawn[rows] = drawn.gather(1, accepted.unsqueeze(1)).squeeze(1)
    state.missing[rows] = (drafts - accepted).int()
    state.guessed[rows, : guesses.shape[1]] = guesses
    state.guessed[rows, guesses.shape[1] :] = NO_TOKEN
