"""How the work of our attending kernels is cut into parts, on the device, once a step: `cuda/parts.cu`."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.mla_decode.plan import DecodePlan
from kernels.nvrtc import CudaKernel, load_kernel

CUDA = Path(__file__).parent / "cuda"
# Rows of the score matrix that one CTA does.
HEADS = 64
SCHEDULE_THREADS, COMBINE_THREADS = 256, 256


class Work(ctypes.Structure):
    """`Work` of the source."""

    _fields_ = (
        ("block_table", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("log_sums", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("borders", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("requests", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("query_tokens", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("part_count", ctypes.c_int),
        ("unit_tokens", ctypes.c_int),
    )


@dataclass(frozen=True)
class Cut:
    """The work of one call, and the tensors that live as long as it."""

    work: Work
    row_tiles: int
    kept: tuple[torch.Tensor, ...]

    def attend(self, kernel: CudaKernel, threads: int, arguments: ctypes.Structure) -> None:
        """Launch the attending kernel on every part and row tile, and the joining of pieces behind it."""
        device = self.kept[0].device
        kernel.launch((self.work.part_count * self.row_tiles, 1, 1), threads, arguments, dependent=True)
        rows = self.work.requests * self.work.query_tokens
        grid = (rows, -(-self.work.heads // 8), 1)
        parts_kernel("combine", device).launch(grid, COMBINE_THREADS, self.work, dependent=True)


def cut_work(plan: DecodePlan, heads: int, out: torch.Tensor, unit_tokens: int) -> Cut:
    """out: [rows * query_tokens, heads, latent]. The schedule is made at a plan's first call."""
    device = out.device
    row_tiles = plan.query_tokens * -(-heads // HEADS)
    parts = max(torch.cuda.get_device_properties(device).multi_processor_count // row_tiles, 1)
    # At most one piece begins with each request, and one with each part.
    slots = (plan.rows + parts) * plan.query_tokens
    pieces = torch.empty(slots, heads, out.shape[2], dtype=out.dtype, device=device)
    log_sums = torch.empty(slots, heads, dtype=torch.float32, device=device)
    schedule = plan.schedule
    scheduled = schedule.metadata is not None
    if not scheduled:
        schedule.metadata = torch.empty(parts + 1, 2, dtype=torch.int32, device=device)
        # Each request's borders, and where its cost begins.
        schedule.splits = torch.empty(3 * plan.rows + 1, dtype=torch.int32, device=device)
    borders, starts = schedule.splits[: 2 * plan.rows], schedule.splits[2 * plan.rows :]
    work = Work(
        plan.block_table.data_ptr(), plan.lengths.data_ptr(), out.data_ptr(), pieces.data_ptr(), log_sums.data_ptr(),
        schedule.metadata.data_ptr(), borders.data_ptr(), starts.data_ptr(), plan.rows, plan.block_table.stride(0),
        plan.query_tokens, heads, parts, unit_tokens,
    )  # fmt: skip
    if not scheduled:
        parts_kernel("schedule", device).launch((1, 1, 1), SCHEDULE_THREADS, work)
    return Cut(work, row_tiles, (pieces, log_sums))


def parts_kernel(name: str, device: torch.device) -> CudaKernel:
    return load_kernel(CUDA / "parts.cu", name, 0, device.index or 0)
