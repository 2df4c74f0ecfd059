"""The layers of a step whose rows have drafts, launched one by one: first the model's layers, then, after the draws,
the draft layers.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional

from engine.batch import Row
from engine.drafts.layers import RowEnds, accepted_drafts, compute_draft_layers, guess, no_block, note_guesses
from engine.drafts.plan import Draws, leading_rows, plan_draft_prompts, plan_draws
from engine.model.context import DeviceState
from engine.model.decode_inputs import DecodeRows
from engine.model.inputs import blocks_of, decode_groups, join_context
from engine.model.model import Model
from engine.runner.micro_batches import MicroBatches
from engine.step.shape import StepShape
from kernels.decode_rows import NO_TOKEN
from kernels.draft_check import settle
from kernels.host_copy import to_device, to_indices

OnLayers = Callable[[int], None] | None


class DraftPass(Protocol):
    """A step's layers, in two parts with the draws between them. Each row with sampling has a line of draws."""

    draws: Draws
    # [tokens or more, hidden] of the step's tokens.
    hidden: torch.Tensor
    # [lines] int32, or more: the position of the first token that the row draws.
    positions: torch.Tensor
    # [lines, n], or more: the drafts that the draws of a line are compared with, NO_TOKEN where there are fewer.
    drafts: torch.Tensor

    def finish(self, token_ids: torch.Tensor) -> "Verified":
        """Write the draft layer's KV, and what later rows may follow. To be called once. token_ids: [draws] int64."""
        ...


class Verified(NamedTuple):
    """What became of a step's drafts, by line. Graphs have more lines, whose values mean nothing."""

    # [lines]: how many drafts are accepted.
    accepted: torch.Tensor
    # [lines, 1 + n]: the draws; any token where a row draws less often.
    drawn: torch.Tensor
    # [lines, count]: the tokens guessed next.
    guesses: torch.Tensor


class EagerPass:
    """A DraftPass of any rows."""

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        rows: Sequence[Row],
        shape: StepShape,
        batches: MicroBatches,
        on_layers: OnLayers,
    ) -> None:
        """on_layers: see `engine.batch.Batch`."""
        self._model, self._state, self._shape, self._size = model, state, shape, batches.size
        decoding = leading_rows(rows)
        prompts = rows[len(decoding) :]
        drawing = [row for row in rows if row.sampling is not None]
        blocks = blocks_of(drawing, more=1 + shape.drafts)
        # The decode rows, by micro-batch and number of drafts; the draft layers compute all of them as one batch.
        self._groups: list[DecodeRows] = []
        offsets = list(accumulate((row.tokens for row in rows), initial=0))
        self._offset = offsets[len(decoding)]
        self._prompts = plan_draft_prompts(prompts, self._offset, state.padding_block)
        width = max((row.draws for row in drawing), default=1)
        self.draws = plan_draws(rows, offsets, width)
        contexts, left = [], len(decoding)
        parts = batches.of(rows, shape)
        for part in parts:
            groups = decode_groups(part.rows[:left], state, blocks)
            contexts.append(part.context(join_context(model.config, groups, part.rows[left:], state, part.size)))
            self._groups += groups
            left -= min(left, len(part.rows))
        self.hidden = batches.hidden_states(model, parts, contexts, on_layers)
        lacking = len(drawing) - len(decoding)
        device = self.hidden.device
        drafts = [_padded(group.token_ids[:, 1:], width - 1) for group in self._groups]
        self.drafts = torch.cat([*drafts, torch.full((lacking, width - 1), NO_TOKEN, dtype=torch.int64, device=device)])
        ends = to_device(np.array(self._prompts.positions, np.int32), device)
        self.positions = torch.cat([*(group.starts + 1 for group in self._groups), ends])
        table = _block_table(drawing[len(decoding) :], blocks, state.padding_block)
        self._table = torch.cat([*(group.block_table for group in self._groups), to_device(table, device)])
        self._most = to_device(np.array([row.drafts for row in drawing], np.int32), device)

    def finish(self, token_ids: torch.Tensor) -> Verified:
        shape, device = self._shape, token_ids.device
        drawn = torch.full((len(self.drafts), self.drafts.shape[1] + 1), NO_TOKEN, dtype=torch.int64, device=device)
        drawn.view(-1)[to_indices(self.draws.places, device)] = token_ids
        accepted = accepted_drafts(self._state, drawn, self.drafts)
        states = self._compute_draft_layers(drawn, accepted)
        if not shape.drawing:
            return Verified(accepted, drawn, drawn[:, :0])
        # All ranks guess together, whichever of them draw, so rows are padded to as many as any rank has.
        padding = shape.drawing - len(accepted)
        rows = to_indices(self.draws.drawing, device)
        lines = accepted, drawn, to_indices(self._first_states(), device), self.positions, self._most
        ends = settle(*lines, rows, self._state.drawn, self._state.missing)
        last, positions = (functional.pad(each, (0, padding)) for each in ends)
        table = functional.pad(self._table, (0, 0, 0, padding), value=self._state.padding_block)
        real = torch.arange(len(table), device=device) < len(accepted)
        guesses = guess(self._model, self._state, states[last], positions, table, real, shape.drafts)[: len(accepted)]
        note_guesses(self._state, rows, guesses)
        return Verified(accepted, drawn, guesses)

    def _compute_draft_layers(self, drawn: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Write the draft layers' KV of all rows; for a row that decodes, after each of its draws. KV after a rejected
        draft is garbage, and the next step overwrites it. Returns the first module's hidden states: [tokens or more,
        hidden].
        """
        shape, state, prompts = self._shape, self._state, self._prompts
        decoding: list[DecodeRows] = []
        line = 0
        for group in self._groups:
            own = drawn[line : line + group.rows, : group.row_tokens]
            decoding.append(DecodeRows(own, group.starts + 1, group.block_table, group.real))
            line += group.rows
        size = self._size(shape.tokens + shape.beginning)
        context = join_context(self._model.config, decoding, prompts.rows, state, size)
        if prompts.drawn:
            places = [self._offset + place for place in prompts.drawn]
            context.token_ids[to_indices(places, drawn.device)] = drawn[line:, 0]
        before = self._hidden_before(size)
        ends = self._row_ends(decoding, accepted) if self._model.config.draft_layers > 1 else None
        return compute_draft_layers(self._model, self._state, before, context, ends)

    def _hidden_before(self, size: int) -> torch.Tensor:
        """The hidden state of the token before each of the draft layers' tokens: [size, hidden]. Zeros come before a
        prompt's first token, and before padding.
        """
        sources = [*self._prompts.sources, *[None] * (size - self._offset - len(self._prompts.sources))]
        if not sources:
            return self.hidden[:size]
        device, places = self.hidden.device, [*range(self._offset), *(source or 0 for source in sources)]
        before = self.hidden.index_select(0, to_indices(places, device))
        if None in sources:
            nothing = [place for place, source in enumerate(sources, self._offset) if source is None]
            before.index_fill_(0, to_indices(nothing, device), 0)
        return before

    def _row_ends(self, decoding: Sequence[DecodeRows], accepted: torch.Tensor) -> RowEnds:
        """decoding: the draft layers' part of rows that decode; accepted: [lines], theirs first."""
        prompts, device = self._prompts, accepted.device
        nothing = no_block(self._state)
        firsts = to_indices([*self._decoding_states(), *(self._offset + index for index in prompts.first)], device)
        lasts = [to_indices([self._offset + index for index in prompts.last], device)]
        before = [to_indices([nothing if block is None else block for block in prompts.blocks_before], device)]
        last_blocks = [to_indices(prompts.last_blocks, device)]
        line = sum(rows.rows for rows in decoding)
        lasts.insert(0, firsts[:line] + accepted[:line])
        for rows in reversed(decoding):
            line -= rows.rows
            last = rows.starts + accepted[line : line + rows.rows].int()
            before.insert(0, rows.blocks_of(rows.starts - 1))
            last_blocks.insert(0, rows.blocks_of(last))
        return RowEnds(firsts, torch.cat(before), torch.cat(lasts), torch.cat(last_blocks))

    def _first_states(self) -> list[int]:
        """By line: the index of its first drawn token among the draft layers' tokens."""
        return [*self._decoding_states(), *(self._offset + place for place in self._prompts.drawn)]

    def _decoding_states(self) -> list[int]:
        """By row that decodes: the index of its first token among the draft layers'."""
        first: list[int] = []
        offset = 0
        for group in self._groups:
            stop = offset + group.rows * group.row_tokens
            first += range(offset, stop, group.row_tokens)
            offset = stop
        return first


def _padded(drafts: torch.Tensor, width: int) -> torch.Tensor:
    return functional.pad(drafts, (0, width - drafts.shape[1]), value=NO_TOKEN)


def _block_table(rows: Sequence[Row], blocks: int, padding_block: int) -> "np.typing.NDArray[np.int32]":
    """[rows, blocks], filled up with the padding block."""
    table = np.full((len(rows), blocks), padding_block, np.int32)
    for line, row in zip(table, rows, strict=True):
        count = min(len(row.block_ids), blocks)
        line[:count] = row.block_ids[:count]
    return table
