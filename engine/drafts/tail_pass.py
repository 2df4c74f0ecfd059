"""A step with drafts and few tokens of prompts, by graphs: known tokens are verified as if they were right drafts."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Row
from engine.drafts.draft_pass import Verified
from engine.drafts.graph import DraftGraph
from engine.drafts.plan import plan_draws
from engine.model.context import DeviceState
from engine.runner.graphs import graph_rows
from kernels.decode_rows import NO_TOKEN
from kernels.host_copy import to_device, to_indices


class TailPass:
    """An `engine.drafts.draft_pass.DraftPass` whose graph is given a prompt's known tokens as draws, and accepts them.

    The token drawn after a prompt comes after these known tokens, which do not count as accepted drafts.
    """

    def __init__(self, graph: DraftGraph, state: DeviceState, rows: Sequence[Row]) -> None:
        self._graph, self._state, device = graph, state, state.device
        self._width = width = 1 + graph.depth
        computed, self._earlier = graph_rows(rows, width)
        ends = computed[self._earlier :]
        # By row of the step: how many known tokens follow the first in the graph's row that ends it.
        self._skipped = [0 if row.decodes else end.tokens - 1 for row, end in zip(rows, ends, strict=True)]
        lines = range(self._earlier, len(computed))
        offsets = [
            line * width + (0 if row.decodes else end.tokens - row.tokens)
            for line, row, end in zip(lines, rows, ends, strict=True)
        ]
        self.draws = plan_draws(rows, offsets, width)
        self._known = _known_draws(computed, self._earlier, self._skipped, width)
        graph.fill(computed, self._earlier)
        graph.compute_model()
        self.hidden, self._own = graph.hidden, slice(self._earlier, len(computed))
        self._skips = to_device(np.array(self._skipped, np.int32), device)
        self.positions = graph.positions[self._own] + self._skips
        prompts = to_device(np.array([not row.decodes for row in rows]), device)
        self.drafts = graph.drafts[self._own].masked_fill(prompts.unsqueeze(1), NO_TOKEN)

    def finish(self, token_ids: torch.Tensor) -> Verified:
        graph, width, device = self._graph, self._width, token_ids.device
        drawn, first = graph.drawn.view(-1), self._earlier * width
        own = [first + place + self._skipped[place // width] for place in self.draws.places]
        drawn[to_indices(own, device)] = token_ids
        drawn[to_indices(list(self._known), device)] = to_indices(list(self._known.values()), device)
        graph.compute_drafts()
        self._move_ends()
        places = torch.arange(width, device=device) + self._skips.unsqueeze(1)
        drawn = graph.drawn[self._own].gather(1, places.clamp(max=width - 1))
        return Verified(graph.accepted[self._own] - self._skips, drawn, graph.guesses[self._own])

    def _move_ends(self) -> None:
        """Put what the step's rows leave in the step's order. Rows of the next step follow rows by their index in the
        step, but in the graph earlier parts of prompts come before them.
        """
        if self._earlier:
            for kept in (self._state.drawn, self._state.missing, self._state.guessed):
                kept[: len(self._skipped)] = kept[self._own].clone()


def _known_draws(rows: Sequence[Row], earlier: int, skipped: Sequence[int], width: int) -> dict[int, int]:
    """By place in the grid of the graph's draws, the tokens of prompts that are known there."""
    known: dict[int, int] = {}
    for line, row in enumerate(rows):
        if line < earlier:
            assert row.next_token is not None
            following = [*row.token_ids[1:], row.next_token]
        else:
            following = list(row.token_ids[1 : 1 + skipped[line - earlier]])
        known |= dict(enumerate(following, start=line * width))
    return known
