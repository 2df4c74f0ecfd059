"""Decode steps with drafts as captured CUDA graphs: one of the model's layers, and one, after the draws, that verifies
them, computes the draft layer and guesses.

The draws themselves are launched between the two, as after graphs without drafts: rows may want penalties, masks or
log probabilities. Nothing between them waits for the host.
"""

from collections.abc import Sequence

import torch

from engine.batch import Row
from engine.drafts.draft_pass import Verified
from engine.drafts.layers import RowEnds, accepted_drafts, compute_draft_layers, guess, note_guesses
from engine.drafts.plan import are_first, plan_draws
from engine.model.context import DeviceState
from engine.model.decode_inputs import DecodeRows, pack_decode_rows, packed_size, unpack_decode_rows
from engine.model.inputs import decode_context
from engine.model.model import Model
from engine.runner import step_parts
from engine.runner.capture import Capture
from engine.step.two_batch import TwoBatch
from kernels.draft_check import settle
from kernels.host_copy import copy_to_device, to_indices


class DraftGraph:
    """Two graphs over the same tensors, which each run overwrites: `drawn`, [rows, 1 + depth] draws that are filled in
    between the two graphs, and the tensors of a DraftPass.
    """

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        rows: int,
        depth: int,
        blocks: int,
        two_batch: TwoBatch,
        capture: Capture,
    ) -> None:
        self._halves = two_batch.wanted(rows * (1 + depth), decode_only=True)
        self._rows, self.depth, self._blocks, self._padding_block = rows, depth, blocks, state.padding_block
        self._packed = torch.empty(packed_size(rows, blocks, depth), dtype=torch.int32, device=state.device)
        self.fill([])
        # By row: the index of its first draw.
        self._first = torch.arange(rows, device=state.device) * (1 + depth)
        # Entries that no row draws keep some earlier token, which is not read.
        self.drawn = torch.zeros(rows, 1 + depth, dtype=torch.int64, device=state.device)
        self._run_model(model.short(), state)
        self._run_drafts(model, state)
        self.compute_model = capture.whole(lambda: self._run_model(model, state))
        self.compute_drafts = capture.whole(lambda: self._run_drafts(model, state))
        # The first runs take graphs to the device, while the host captures the next ones.
        self.compute_model()
        self.compute_drafts()

    def fill(self, rows: Sequence[Row], earlier: int = 0) -> None:
        """See `GraphRows`."""
        packed = pack_decode_rows(rows, self._rows, self._blocks, self._padding_block, self.depth, earlier)
        copy_to_device(packed, self._packed)

    def _run_model(self, model: Model, state: DeviceState) -> None:
        known = unpack_decode_rows(self._packed, self._rows, self.depth).known(state)
        self.positions, self.drafts, self._real = known.starts + 1, known.token_ids[:, 1:], known.real
        self.hidden = step_parts.hidden_states(model, step_parts.decode_parts(known, state, halves=self._halves))

    def _run_drafts(self, model: Model, state: DeviceState) -> None:
        inputs = unpack_decode_rows(self._packed, self._rows, self.depth)
        # Draft layers compute after all draws. What they write after a wrong draft is garbage, and the next step
        # overwrites it.
        modules = model.config.draft_layers
        # Draft layers are one position later than the model. A single module writes the KV of all its tokens.
        shared = (inputs.shared - 1).clamp(min=0) if modules > 1 else None
        rows = DecodeRows(self.drawn, self.positions, inputs.block_table, self._real, shared)
        self.accepted = accepted_drafts(state, self.drawn, self.drafts)
        lines = self.accepted, self.drawn, self._first, self.positions, inputs.drafts
        last, positions = settle(*lines, None, state.drawn, state.missing)
        ends = None
        if modules > 1:
            ends = RowEnds(self._first, rows.blocks_of(self.positions - 1), last, rows.blocks_of(positions))
        states = compute_draft_layers(model, state, self.hidden, decode_context(rows, state), ends)
        guessing = states[last], positions, rows.block_table, rows.real
        self.guesses = guess(model, state, *guessing, self.depth, inputs.goes_on)
        note_guesses(state, slice(0, self._rows), self.guesses)


class CapturedPass:
    """An `engine.drafts.draft_pass.DraftPass` by graphs, of rows that decode."""

    def __init__(self, graph: DraftGraph, rows: Sequence[Row]) -> None:
        self._graph = graph
        width = 1 + graph.depth
        self.draws = plan_draws(rows, range(0, len(rows) * width, width), width)
        graph.fill(rows)
        graph.compute_model()
        self.hidden, self.positions, self.drafts = graph.hidden, graph.positions, graph.drafts

    def finish(self, token_ids: torch.Tensor) -> Verified:
        places, drawn = self.draws.places, self._graph.drawn.view(-1)
        if are_first(places):
            drawn[: len(places)] = token_ids
        else:
            drawn[to_indices(places, drawn.device)] = token_ids
        self._graph.compute_drafts()
        return Verified(self._graph.accepted, self._graph.drawn, self._graph.guesses)
