"""Decode steps as captured CUDA graphs: one launch instead of some two thousand."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from engine.batch import Row
from engine.model.context import DeviceState
from engine.model.decode_inputs import pack_decode_rows, packed_size, unpack_decode_rows
from engine.model.model import Model
from engine.runner import step_parts
from engine.runner.capture import Capture
from engine.step.shape import StepShape
from engine.step.two_batch import NEVER, TwoBatch
from kernels.host_copy import copy_to_device


class GraphRows(NamedTuple):
    """The rows of a decode graph that compute the rows of a step. Each has one token, and drafts or more tokens of its
    prompt after it. A few tokens of a prompt may take several rows.

    Each row of the graph attends to what is before its own tokens. A layer writes the KV of all rows before it attends,
    so tokens of one prompt may be in different rows. If the graph computes two micro-batches, earlier tokens have to be
    in the earlier one.
    """

    rows: Sequence[Row]
    # How many of the first rows are parts of prompts that go on in later rows. The others are the ends of the step's
    # rows, one each, in the step's order.
    earlier: int


def graph_rows(rows: Sequence[Row], width: int) -> GraphRows:
    """rows: of a batch; width: how many tokens a row of the graph has at most, and so has any row that decodes."""
    if not rows or rows[-1].decodes:
        # Then all rows decode: rows of prompts come last, unless they have one token.
        return GraphRows(rows, 0)
    earlier: list[Row] = []
    last: list[Row] = []
    for row in rows:
        parts = [row] if row.decodes else _parts(row, width)
        earlier += parts[:-1]
        last.append(parts[-1])
    return GraphRows([*earlier, *last], len(earlier))


def _parts(row: Row, width: int) -> list[Row]:
    return [
        Row(
            row.token_ids[first : first + width],
            row.start + first,
            row.block_ids,
            None,
            drafts=min(width, row.tokens - first) - 1,
            shared=min(max(row.shared - first, 0), width),
            next_token=row.token_ids[first + width] if first + width < row.tokens else row.next_token,
        )
        for first in range(0, row.tokens, width)
    ]


class DecodeGraphs:
    """Graphs of decode steps by number of rows; a batch runs in the next larger one, and padding rows fill that up."""

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        sizes: Sequence[int],
        blocks: int,
        capture: Capture,
        two_batch: TwoBatch = NEVER,
    ) -> None:
        """blocks: the most that any row has; two_batch: which graphs compute two micro-batches."""
        self._blocks = blocks
        self._padding_block = state.padding_block
        self._graphs = [
            _DecodeGraph(model, state, rows, blocks, two_batch, capture) for rows in sorted(sizes, reverse=True)
        ]
        self._graphs.reverse()

    @property
    def most_rows(self) -> int:
        return self._graphs[-1].rows

    @property
    def count(self) -> int:
        return len(self._graphs)

    def fit(self, shape: StepShape) -> bool:
        return shape.decode_only and shape.rows <= self.most_rows

    def run(self, rows: Sequence[Row], shape: StepShape) -> torch.Tensor:
        """Logits [rows, vocabulary] of each row's last token, if the shape fits; to be read before the next run."""
        graph = next(graph for graph in self._graphs if graph.rows >= shape.rows)
        computed, earlier = graph_rows(rows, 1)
        packed = pack_decode_rows(computed, graph.rows, self._blocks, self._padding_block)
        copy_to_device(packed, graph.packed)
        graph.replay()
        return graph.logits[earlier : len(computed)]


class _DecodeGraph:
    def __init__(
        self, model: Model, state: DeviceState, rows: int, blocks: int, two_batch: TwoBatch, capture: Capture
    ) -> None:
        self.rows = rows
        # All rows are padding: they write one slot of the padding block, which is never read.
        padding = pack_decode_rows([], rows, blocks, state.padding_block)
        self.packed = torch.empty(packed_size(rows, blocks), dtype=torch.int32, device=state.device)
        copy_to_device(padding, self.packed)
        inputs = unpack_decode_rows(self.packed, rows)
        halves = two_batch.wanted(rows, decode_only=True)

        def forward(model: Model) -> None:
            parts = step_parts.decode_parts(inputs.known(state), state, halves=halves)
            self.logits = step_parts.logits(model, parts)

        forward(model.short())
        self.replay = capture.whole(partial(forward, model))
        # The first run takes a graph to the device, while the host captures the next one.
        self.replay()
