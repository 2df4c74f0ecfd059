"""Decode steps as captured CUDA graphs: one launch instead of some two thousand."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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
from kernels.sample import greedy


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


# Integers of an address, and places on the host: more than there are steps in flight.
ADDRESS, TURNS = 2, 4


class Likeliest(NamedTuple):
    """[rows] int64 each."""

    on_device: torch.Tensor
    # To be read when the step has ended, and before the next but one is launched.
    on_host: torch.Tensor


class Found(NamedTuple):
    """What a graph leaves of a step's rows."""

    # [rows, vocabulary]
    logits: torch.Tensor
    # Each row's most likely token, which `DeviceState.drawn` has too. None if other ranks draw, or if the rows are not
    # the graph's first ones.
    likeliest: Likeliest | None


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

    def run(self, rows: Sequence[Row], shape: StepShape) -> Found:
        """What follows each row's last token, if the shape fits; to be read before the next run."""
        graph = next(graph for graph in self._graphs if graph.rows >= shape.rows)
        computed, earlier = graph_rows(rows, 1)
        packed = pack_decode_rows(computed, graph.rows, self._blocks, self._padding_block)
        on_host = graph.run(packed)
        likeliest = None
        if not earlier and graph.likeliest is not None:
            on_device = graph.likeliest[: len(computed)]
            likeliest = Likeliest(on_device, on_device if on_host is None else on_host[: len(computed)])
        return Found(graph.logits[earlier : len(computed)], likeliest)


class _DecodeGraph:
    def __init__(
        self, model: Model, state: DeviceState, rows: int, blocks: int, two_batch: TwoBatch, capture: Capture
    ) -> None:
        self.rows = rows
        # All rows are padding: they write one slot of the padding block, which is never read.
        padding = pack_decode_rows([], rows, blocks, state.padding_block)
        # Where the tokens go on the host, and the rows.
        self._given = torch.empty(ADDRESS + packed_size(rows, blocks), dtype=torch.int32, device=state.device)
        inputs = unpack_decode_rows(self._given[ADDRESS:], rows)
        # In turns; the GPU writes there. Kept for good, since a step that is never collected writes too.
        self._kept: torch.Tensor | None = None
        if state.device.type != "cpu":
            self._kept = torch.empty(TURNS, rows, dtype=torch.int64, pin_memory=True)
        self._turn = 0
        self._give(padding)
        address = None if self._kept is None else self._given[:ADDRESS].view(torch.int64)
        halves = two_batch.wanted(rows, decode_only=True)

        def forward(model: Model) -> None:
            parts = step_parts.decode_parts(inputs.known(state), state, halves=halves)
            self.logits = step_parts.logits(model, parts)
            # Tokens that are drawn otherwise replace these.
            self.likeliest = None if model.group.divides else greedy(self.logits, state.drawn, address)

        forward(model.short())
        self._replay = capture.whole(partial(forward, model))
        # The first run takes a graph to the device, while the host captures the next one.
        self._replay()

    def run(self, packed: npt.NDArray[np.int32]) -> torch.Tensor | None:
        """Returns where the host finds the most likely tokens when the graph has run: [rows] int64. None if there is no
        such place.
        """
        self._turn = (self._turn + 1) % TURNS
        self._give(packed)
        self._replay()
        return None if self._kept is None else self._kept[self._turn]

    def _give(self, packed: npt.NDArray[np.int32]) -> None:
        target = 0 if self._kept is None else self._kept[self._turn].data_ptr()
        copy_to_device(np.concatenate([np.array([target], np.int64).view(np.int32), packed]), self._given)
