"""Where the contexts of one step's decode rows lie: made once a step, read by every layer."""

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.kv_copy import slot_runs


@dataclass(slots=True)
class Schedule:
    """What a kernel makes at the step's first layer and reuses at the others; None before."""

    metadata: Any = None
    splits: Any = None


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Rows of equal query count and any context length. Tensors are read on the device only, never by the host."""

    # [rows, max_blocks] int32: the pool's blocks of each row, in order. Entries behind a row's context are not read.
    block_table: torch.Tensor
    # [rows] int32: tokens of each row's context, its own queries included; at least `query_tokens`.
    lengths: torch.Tensor
    # Queries of every row: the last ones of its context.
    query_tokens: int
    # On CPU only: per row the contiguous slots of its context.
    runs: tuple[tuple[slice, ...], ...] | None
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]


def plan_decode(block_table: torch.Tensor, lengths: torch.Tensor, query_tokens: int = 1) -> DecodePlan:
    """What all layers of one step share.

    block_table: [rows, max_blocks] int32; lengths: [rows] int32, on the same device; query_tokens: 1, or more where
    drafts are verified. On a GPU nothing is copied to the host. In a CUDA graph, make the plan inside the capture: what
    depends on the lengths is then computed anew at each replay, from what the two tensors hold by then.
    """
    rows = lengths.shape[0]
    assert block_table.dim() == 2 and block_table.shape[0] == rows and query_tokens >= 1
    assert block_table.dtype == lengths.dtype == torch.int32
    runs = None if lengths.is_cuda else context_runs(block_table, lengths)
    return DecodePlan(block_table=block_table, lengths=lengths, query_tokens=query_tokens, runs=runs)


def context_runs(block_table: torch.Tensor, lengths: torch.Tensor) -> tuple[tuple[slice, ...], ...]:
    """Per row the slots of its context as the fewest contiguous slices. Waits for the device."""
    rows = zip(block_table.tolist(), lengths.tolist(), strict=True)
    return tuple(tuple(slot_runs(blocks, length)) for blocks, length in rows)
