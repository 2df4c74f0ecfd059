"""Divides the work of our attention kernels into parts, on the device and once a step, and combines split requests.

Sources: `cuda/parts.cu` and `cuda/combine.cu`.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.hopper import processors
from kernels.mla_decode.attended import Pieces
from kernels.mla_decode.plan import DecodePlan
from kernels.nvrtc import CudaKernel, load_kernel
from kernels.structures import structure

CUDA = Path(__file__).parent / "cuda"
Work = structure(CUDA / "parts.cuh", "Work")
# Rows of the score matrix that one CTA computes.
HEADS = 64
# Up to this many tokens pieces are joined where values are expanded, and may be shorter. There a CTA reads all pieces
# of its head and joins some 19 in a us; the kernel that combines them costs 3.3 to 4.4 us. A token that attends to
# 3,500 has 28 short pieces. The source has the same constant.
FEW_TOKENS = 2
SCHEDULE_THREADS, COMBINE_THREADS, TRIED, MOST_PARTS = 256, 256, 8, 160
# CTAs on a multiprocessor.
COMBINE_CTAS = 2


@dataclass(frozen=True)
class Parts:
    """The schedule and the memory that it is made in: int32, laid out as `Work` of the source says."""

    parts: torch.Tensor
    pieces: torch.Tensor
    split_requests: torch.Tensor
    tried: torch.Tensor
    units: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True)
class DividedWork:
    """The work of one call, and the tensors that must live as long as it."""

    # `Work` of the source.
    work: ctypes.Structure
    row_tiles: int
    # Multiprocessors of the device.
    processors: int
    # Whether an earlier call has made the schedule.
    scheduled: bool
    kept: tuple[torch.Tensor, ...]

    @property
    def pieces(self) -> Pieces | None:
        """The pieces that the attention kernel leaves; None if it leaves none."""
        return self if self.work.part_count > 1 else None

    def attend(self, kernel: CudaKernel, threads: int, arguments: ctypes.Structure) -> None:
        """Launch the attention kernel on every part and row tile."""
        # A kernel launched as a dependent one reads the schedule before it waits, so a new schedule must be complete.
        grid = (self.work.part_count * self.row_tiles, 1, 1)
        kernel.launch(grid, threads, arguments, dependent=self.scheduled)

    def join(self) -> None:
        """Launch the kernel that combines pieces, after the attention kernel."""
        combining = load_kernel(CUDA / "combine.cu", "combine", self.kept[0].device.index or 0)
        combining.launch((COMBINE_CTAS * self.processors, 1, 1), COMBINE_THREADS, self.work, dependent=True)


def divide_work(plan: DecodePlan, heads: int, out: torch.Tensor, unit_tokens: int) -> DividedWork:
    """out: [rows * query_tokens, heads, latent]. The schedule is made at a plan's first call."""
    device = out.device
    row_tiles = plan.query_tokens * -(-heads // HEADS)
    parts = max(processors(device) // row_tiles, 1)
    assert parts < MOST_PARTS
    # Fewer requests than parts are split, and each part's border splits at most one of them.
    slots = 2 * parts
    values = torch.empty(slots * plan.query_tokens, heads, out.shape[2], dtype=out.dtype, device=device)
    log_sums = torch.empty(slots * plan.query_tokens, heads, dtype=torch.float32, device=device)
    schedule = plan.schedule
    scheduled = schedule.metadata is not None
    if not scheduled:
        schedule.metadata = _empty_parts(plan.rows, parts, device)
    made: Parts = schedule.metadata
    work = Work(
        block_table=plan.block_table.data_ptr(), lengths=plan.lengths.data_ptr(), out=out.data_ptr(),
        values=values.data_ptr(), log_sums=log_sums.data_ptr(), parts=made.parts.data_ptr(),
        pieces=made.pieces.data_ptr(), split_requests=made.split_requests.data_ptr(), tried=made.tried.data_ptr(),
        units=made.units.data_ptr(), order=made.order.data_ptr(), requests=plan.rows,
        table_stride=plan.block_table.stride(0), query_tokens=plan.query_tokens, heads=heads, part_count=parts,
        unit_tokens=unit_tokens,
    )  # fmt: skip
    if not scheduled:
        kernel = load_kernel(CUDA / "parts.cu", "schedule", device.index or 0)
        kernel.launch((1, 1, 1), SCHEDULE_THREADS, work)
    return DividedWork(work, row_tiles, processors(device), scheduled, (values, log_sums))


def _empty_parts(rows: int, parts: int, device: torch.device) -> Parts:
    shapes = (parts + 1,), (rows + parts, 4), (parts, 4), (TRIED, rows), (rows,), (rows, 2)
    return Parts(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))
