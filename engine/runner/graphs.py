"""Decode steps as captured CUDA graphs: one launch instead of some two thousand."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.batch import Row, StepShape
from engine.model.context import DeviceState
from engine.model.decode_inputs import pack_decode_rows, packed_size, unpack_decode_rows
from engine.model.inputs import decode_context
from engine.model.model import Model
from kernels.host_copy import copy_to_device

# Captured kernels keep their stream's priority; lower numbers go first.
HIGH_PRIORITY = -1


def default_sizes(max_requests: int) -> list[int]:
    """Numbers of rows, closest together where one row more costs most."""
    sizes = [1, 2, 4, *range(8, min(max_requests, 128), 8), *range(128, max_requests, 32), max_requests]
    return sorted({size for size in sizes if size <= max_requests})


class DecodeGraphs:
    """Graphs of decode steps by number of rows; a batch runs in the next larger one, and padding rows fill that up."""

    def __init__(self, model: Model, state: DeviceState, sizes: Sequence[int], blocks: int) -> None:
        """blocks: the most that any row has."""
        self._blocks = blocks
        self._padding_block = state.padding_block
        # Graphs run one at a time, so they share their memory; the largest, captured first, sets its size.
        pool = torch.cuda.graph_pool_handle()
        self._graphs = [_DecodeGraph(model, state, rows, blocks, pool) for rows in sorted(sizes, reverse=True)]
        self._graphs.reverse()

    def fit(self, shape: StepShape) -> bool:
        return shape.decode_only and shape.tokens <= self._graphs[-1].rows

    def run(self, rows: Sequence[Row], most_rows: int) -> torch.Tensor:
        """Logits [rows, vocabulary] from the graph for `most_rows`, if that fits; to be read before the next run."""
        graph = next(graph for graph in self._graphs if graph.rows >= most_rows)
        packed = pack_decode_rows(rows, graph.rows, self._blocks, self._padding_block)
        copy_to_device(packed, graph.packed)
        graph.graph.replay()
        return graph.logits[: len(rows)]


class _DecodeGraph:
    def __init__(self, model: Model, state: DeviceState, rows: int, blocks: int, pool: Any) -> None:
        self.rows = rows
        # All rows are padding: they write one slot of the padding block, which nobody reads.
        padding = pack_decode_rows([], rows, blocks, state.padding_block)
        self.packed = torch.empty(packed_size(rows, blocks), dtype=torch.int32, device=state.device)
        copy_to_device(padding, self.packed)
        inputs = unpack_decode_rows(self.packed, rows)
        # Compilation and one-time allocations must not happen in a capture.
        model.forward(decode_context(inputs, state))
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Steps go before the copies of transfers, which use what steps leave of the device.
        stream = torch.cuda.Stream(priority=HIGH_PRIORITY)
        with torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.logits = model.forward(decode_context(inputs, state))
