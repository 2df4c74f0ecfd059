"""Decode steps as captured CUDA graphs: one launch instead of some two thousand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import Row, StepShape
from engine.model.context import DeviceState
from engine.model.decode_inputs import pack_decode_rows, packed_size, unpack_decode_rows
from engine.model.model import Model
from engine.runner import step_parts
from engine.runner.graph_rows import graph_rows
from engine.step.two_batch import NEVER, TwoBatch
from kernels.host_copy import copy_to_device

# Captured kernels keep their stream's priority; lower numbers go first.
HIGH_PRIORITY = -1


@dataclass(frozen=True, slots=True)
class GraphPool:
    """Memory that graphs share, since they run one at a time; the largest, captured first, sets its size."""

    handle: Any
    # The stream on which all are captured, since torch reuses what is freed on a stream for that stream alone. Its
    # priority puts steps before the copies of transfers, which use what steps leave of the device.
    stream: torch.cuda.Stream


def default_sizes(max_requests: int, coarse: bool = False) -> list[int]:
    """Numbers of rows, closest together where one row more costs most. coarse: fewer, for graphs of several depths."""
    step = 16 if coarse else 8
    sizes = [1, 2, 4, 8, *range(step, min(max_requests, 128), step), *range(128, max_requests, 4 * step), max_requests]
    return sorted({size for size in sizes if size <= max_requests})


class DecodeGraphs:
    """Graphs of decode steps by number of rows; a batch runs in the next larger one, and padding rows fill that up."""

    def __init__(
        self, model: Model, state: DeviceState, sizes: Sequence[int], blocks: int, two_batch: TwoBatch = NEVER
    ) -> None:
        """blocks: the most that any row has; two_batch: which graphs compute two micro-batches."""
        self._blocks = blocks
        self._padding_block = state.padding_block
        pool = graph_pool()
        self._graphs = [
            _DecodeGraph(model, state, rows, blocks, two_batch, pool) for rows in sorted(sizes, reverse=True)
        ]
        self._graphs.reverse()

    @property
    def most_rows(self) -> int:
        return self._graphs[-1].rows

    def fit(self, shape: StepShape) -> bool:
        return shape.decode_only and shape.rows <= self.most_rows

    def run(self, rows: Sequence[Row], shape: StepShape) -> torch.Tensor:
        """Logits [rows, vocabulary] behind each row, if the shape fits; to be read before the next run."""
        graph = next(graph for graph in self._graphs if graph.rows >= shape.rows)
        computed, earlier = graph_rows(rows, 1)
        packed = pack_decode_rows(computed, graph.rows, self._blocks, self._padding_block)
        copy_to_device(packed, graph.packed)
        graph.replay()
        return graph.logits[earlier : len(computed)]


class _DecodeGraph:
    def __init__(
        self, model: Model, state: DeviceState, rows: int, blocks: int, two_batch: TwoBatch, pool: GraphPool
    ) -> None:
        self.rows = rows
        # All rows are padding: they write one slot of the padding block, which nobody reads.
        padding = pack_decode_rows([], rows, blocks, state.padding_block)
        self.packed = torch.empty(packed_size(rows, blocks), dtype=torch.int32, device=state.device)
        copy_to_device(padding, self.packed)
        inputs = unpack_decode_rows(self.packed, rows)
        halves = two_batch.wanted(rows, decode_only=True)

        def forward() -> None:
            parts = step_parts.decode_parts(inputs.known(state), state, halves=halves)
            self.logits = step_parts.logits(model, parts)

        self.replay = capture(forward, pool)


def graph_pool() -> GraphPool:
    return GraphPool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(priority=HIGH_PRIORITY))


def capture(work: Callable[[], None], pool: GraphPool) -> Callable[[], None]:
    """Run the work once, and capture it. Returns a function that runs it again, over the same tensors."""
    # Compilation and one-time allocations must not happen in a capture.
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream):
        work()
    return graph.replay
