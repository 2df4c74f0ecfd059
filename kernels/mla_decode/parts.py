"""How the work of our attending kernels is cut into parts on the device, once a step, and joined: `cuda/parts.cu`,
`cuda/combine.cu`."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.mla_decode.plan import DecodePlan
from kernels.nvrtc import CudaKernel, load_kernel

CUDA = Path(__file__).parent / "cuda"
# Rows of the score matrix that one CTA does.
HEADS = 64
SCHEDULE_THREADS, COMBINE_THREADS, TRIED, MOST_PARTS = 256, 256, 8, 160
# On a multiprocessor.
COMBINE_CTAS = 2


class Work(ctypes.Structure):
    """`Work` of the source."""

    _fields_ = (
        ("block_table", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("log_sums", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("cuts", ctypes.c_void_p),
        ("tried", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("requests", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("query_tokens", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("part_count", ctypes.c_int),
        ("unit_tokens", ctypes.c_int),
    )


@dataclass(frozen=True)
class Parts:
    """The schedule, and what it is made from: int32, as `Work` of the source tells."""

    parts: torch.Tensor
    pieces: torch.Tensor
    cuts: torch.Tensor
    tried: torch.Tensor
    units: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True)
class Cut:
    """The work of one call, and the tensors that live as long as it."""

    work: Work
    row_tiles: int
    # Of the device.
    processors: int
    # Whether the schedule is that of an earlier call.
    scheduled: bool
    kept: tuple[torch.Tensor, ...]

    def attend(self, kernel: CudaKernel, threads: int, arguments: ctypes.Structure) -> None:
        """Launch the attending kernel on every part and row tile, and the joining of pieces behind it."""
        work = self.work
        # Not before a new schedule is there: the kernels behind read it before they wait.
        grid = (work.part_count * self.row_tiles, 1, 1)
        kernel.launch(grid, threads, arguments, dependent=self.scheduled)
        if work.part_count > 1:
            joining = load_kernel(CUDA / "combine.cu", "combine", self.kept[0].device.index or 0)
            joining.launch((COMBINE_CTAS * self.processors, 1, 1), COMBINE_THREADS, work, dependent=True)


def cut_work(plan: DecodePlan, heads: int, out: torch.Tensor, unit_tokens: int) -> Cut:
    """out: [rows * query_tokens, heads, latent]. The schedule is made at a plan's first call."""
    device = out.device
    row_tiles = plan.query_tokens * -(-heads // HEADS)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    parts = max(processors // row_tiles, 1)
    assert parts < MOST_PARTS
    # Fewer requests than parts are cut, and each part cuts one of them at the most.
    slots = 2 * parts
    values = torch.empty(slots * plan.query_tokens, heads, out.shape[2], dtype=out.dtype, device=device)
    log_sums = torch.empty(slots * plan.query_tokens, heads, dtype=torch.float32, device=device)
    schedule = plan.schedule
    scheduled = schedule.metadata is not None
    if not scheduled:
        schedule.metadata = _empty_parts(plan.rows, parts, device)
    made: Parts = schedule.metadata
    work = Work(
        plan.block_table.data_ptr(), plan.lengths.data_ptr(), out.data_ptr(), values.data_ptr(), log_sums.data_ptr(),
        made.parts.data_ptr(), made.pieces.data_ptr(), made.cuts.data_ptr(), made.tried.data_ptr(),
        made.units.data_ptr(), made.order.data_ptr(), plan.rows, plan.block_table.stride(0), plan.query_tokens, heads,
        parts, unit_tokens,
    )  # fmt: skip
    if not scheduled:
        kernel = load_kernel(CUDA / "parts.cu", "schedule", device.index or 0)
        kernel.launch((1, 1, 1), SCHEDULE_THREADS, work)
    return Cut(work, row_tiles, processors, scheduled, (values, log_sums))


def _empty_parts(rows: int, parts: int, device: torch.device) -> Parts:
    shapes = (parts + 1,), (rows + parts, 4), (parts, 4), (TRIED, rows), (rows,), (rows, 2)
    return Parts(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))
