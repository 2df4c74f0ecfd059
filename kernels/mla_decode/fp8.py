"""Our decode attention over an e4m3 pool, with FP8 products on Hopper: `cuda/fp8_decode.cu`."""

import ctypes
import math
from functools import lru_cache
from pathlib import Path

import torch

from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode.plan import DecodePlan
from kernels.nvrtc import CudaKernel, encode_rows, load_kernel

SOURCE = Path(__file__).parent / "cuda" / "fp8_decode.cu"
LATENT, WIDTH, HEADS = 512, 576, 64
THREADS, SCHEDULE_THREADS, COMBINE_THREADS = 384, 32, 256
# `Shared` of the source: the query and five blocks, a unit's probabilities, six floats a row, ten barriers, a count.
SHARED_BYTES = 36864 * 6 + 8192 + 6 * 64 * 4 + 10 * 8 + 8


class Arguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        ("latents", ctypes.c_uint64 * 16),
        ("keys", ctypes.c_uint64 * 16),
        ("query", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("log_sums", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("borders", ctypes.c_void_p),
        ("requests", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("query_tokens", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
        ("kv_scale", ctypes.c_float),
        # To a multiple of the maps' alignment, 64.
        ("padding", ctypes.c_byte * 28),
    )


def takes(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, value_width: int) -> bool:
    """Whether this kernel computes it: DeepSeek's widths, on Hopper."""
    return (
        pool.dtype == torch.float8_e4m3fn
        and query.dtype == torch.bfloat16
        and (value_width, pool.shape[2]) == (LATENT, WIDTH)
        and torch.cuda.get_device_capability(query.device)[0] == 9
    )


def mla_decode(
    query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float, kv_scale: float
) -> torch.Tensor:
    tokens, heads, _ = query.shape
    device = query.device
    out = torch.empty(tokens, heads, LATENT, dtype=query.dtype, device=device)
    if not tokens:
        return out
    row_tiles = plan.query_tokens * -(-heads // HEADS)
    parts = max(torch.cuda.get_device_properties(device).multi_processor_count // row_tiles, 1)
    # At most one piece begins with each request, and one with each part.
    slots = (plan.rows + parts) * plan.query_tokens
    pieces = torch.empty(slots, heads, LATENT, dtype=query.dtype, device=device)
    log_sums = torch.empty(slots, heads, dtype=torch.float32, device=device)
    schedule = plan.schedule
    scheduled = schedule.metadata is not None
    if not scheduled:
        schedule.metadata = torch.empty(plan.rows + 1, dtype=torch.int32, device=device)
        schedule.splits = torch.empty(plan.rows, 2, dtype=torch.int32, device=device)
    arguments = Arguments(
        *_tensor_maps(pool.data_ptr(), pool.shape[0]),
        query.data_ptr(), pool.data_ptr(), plan.block_table.data_ptr(), plan.lengths.data_ptr(), out.data_ptr(),
        pieces.data_ptr(), log_sums.data_ptr(), schedule.metadata.data_ptr(), schedule.splits.data_ptr(), plan.rows,
        plan.block_table.stride(0), plan.query_tokens, heads, parts, scale * math.log2(math.e), kv_scale,
    )  # fmt: skip
    if not scheduled:
        _kernel("schedule", device).launch((1, 1, 1), SCHEDULE_THREADS, arguments)
    _kernel("decode_rest" if heads % HEADS else "decode", device, SHARED_BYTES).launch(
        (parts * row_tiles, 1, 1), THREADS, arguments
    )
    _kernel("combine", device).launch((tokens, -(-heads // 8), 1), COMBINE_THREADS, arguments)
    return out


@lru_cache(maxsize=1024)
def _tensor_maps(pool: int, blocks: int) -> tuple[ctypes.Array[ctypes.c_uint64], ctypes.Array[ctypes.c_uint64]]:
    """How the copy engine reads a block of one layer's pool: its latents in four boxes, its keys in one."""
    rows = blocks * BLOCK_TOKENS
    latents = encode_rows(pool, rows=rows, row_bytes=WIDTH, box_rows=BLOCK_TOKENS, box_bytes=128)
    return latents, encode_rows(pool, rows=rows, row_bytes=WIDTH, box_rows=BLOCK_TOKENS, box_bytes=64)


def _kernel(name: str, device: torch.device, shared_bytes: int = 0) -> CudaKernel:
    return load_kernel(SOURCE, name, shared_bytes, device.index or 0)
