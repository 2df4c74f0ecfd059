"""The draft layers of a step's known tokens: what each MTP module makes of them, one module after the other.

Module k reads a token with the state that module k - 1 made of the token before it. For a row's first token that state
comes from the step that computed the token before: it lies in `DeviceState.draft_states`, by that token's block. All of
this is tensors alone, so that a graph can capture it.
"""

from typing import NamedTuple

import torch

from engine.model.context import DeviceState, ForwardContext
from engine.model.model import Model


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
