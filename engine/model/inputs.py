"""From a step's plain rows to the tensors of one forward pass."""

from collections.abc import Sequence

import torch

from engine.batch import Row
from engine.model.context import Chunk, ForwardContext
from kernels.kv_copy import slot_runs
from kernels.mla_decode import plan_decode
from mesh.blocks import BLOCK_TOKENS


def build_context(rows: Sequence[Row], rotations: torch.Tensor, kv_pool: torch.Tensor) -> ForwardContext:
    """Rows of one token decode, whatever their context; the others are chunks of prompts.

    rows: those of one token first; rotations: the table of `model_rotations`, at least as long as any row's end.
    """
    decoding = [row for row in rows if len(row.token_ids) == 1]
    assert all(len(row.token_ids) > 1 for row in rows[len(decoding) :])
    positions = [position for row in rows for position in range(row.start, row.end)]
    slots = [slot for row in rows for slot in _slots(row)]
    ends = torch.tensor([len(row.token_ids) for row in rows]).cumsum(0).tolist()

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=kv_pool.device)

    return ForwardContext(
        token_ids=tensor([token_id for row in rows for token_id in row.token_ids]),
        rotations=rotations.index_select(0, tensor(positions)),
        slots=tensor(slots),
        decode_tokens=len(decoding),
        decode_plan=plan_decode([slot_runs(row.block_ids, row.end) for row in decoding]),
        chunks=[_chunk(row, end) for row, end in zip(rows, ends, strict=True) if len(row.token_ids) > 1],
        sampled=tensor([end - 1 for row, end in zip(rows, ends, strict=True) if row.sampling is not None]),
        kv_pool=kv_pool,
    )


def _slots(row: Row) -> list[int]:
    """The pool slot of each of the row's own tokens."""
    return [
        row.block_ids[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
        for position in range(row.start, row.end)
    ]


def _chunk(row: Row, stop: int) -> Chunk:
    return Chunk(first=stop - len(row.token_ids), stop=stop, runs=slot_runs(row.block_ids, row.end), cached=row.start)
