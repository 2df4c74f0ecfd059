"""Where the contexts of a step's decode rows lie in the pool. Made once a step, read by every layer."""

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.kv_copy import slot_runs


@dataclass(slots=True)
class Schedule:
    """What a kernel computes at a step's first layer and reuses at the others; None before that."""

    metadata: Any = None
    splits: Any = None
    # The plan of attention to selected tokens, by how many a query selects at most.
    selected: dict[int, "DecodePlan"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Rows with the same number of queries and any context lengths. The host never reads the tensors."""

    # [rows, max_blocks] int32: each row's blocks in the pool, in order. Entries after a row's context are not read.
    block_table: torch.Tensor
    # [rows] int32: tokens of each row's context, including its queries; at least `query_tokens`.
    lengths: torch.Tensor
    # Queries of every row; they are the last tokens of its context.
    query_tokens: int
    # The step writes no more than this many of a context's last tokens, by any of its rows: tokens of one prompt may be
    # rows of their own. A kernel that begins before earlier ones have ended reads only what is before them.
    written_tokens: int
    # On a CPU: for each row the contiguous slots of its context. None on a GPU.
    runs: tuple[tuple[slice, ...], ...] | None
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]


def plan_decode(
    block_table: torch.Tensor, lengths: torch.Tensor, query_tokens: int = 1, written_tokens: int | None = None
) -> DecodePlan:
    """Make the plan that all layers of one step share.

    block_table: [rows, max_blocks] int32; lengths: [rows] int32, on the same device; query_tokens: 1, or more where
    drafts are verified; written_tokens: see `DecodePlan`, None if the step has these rows alone. On a GPU nothing is
    copied to the host. In a CUDA graph, make the plan inside the capture: each replay then computes again what depends
    on the lengths, from the values that the two tensors have by then.
    """
    rows = lengths.shape[0]
    assert block_table.dim() == 2 and block_table.shape[0] == rows and query_tokens >= 1
    assert block_table.dtype == lengths.dtype == torch.int32
    runs = None if lengths.is_cuda else context_runs(block_table, lengths)
    written_tokens = rows * query_tokens if written_tokens is None else written_tokens
    return DecodePlan(block_table, lengths, query_tokens, written_tokens, runs)


def context_runs(block_table: torch.Tensor, lengths: torch.Tensor) -> tuple[tuple[slice, ...], ...]:
    """For each row, the slots of its context as the fewest contiguous slices. Waits for the device."""
    rows = zip(block_table.tolist(), lengths.tolist(), strict=True)
    return tuple(tuple(slot_runs(blocks, length)) for blocks, length in rows)
