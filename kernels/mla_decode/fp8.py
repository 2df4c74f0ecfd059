"""Our decode attention over an e4m3 pool, with FP8 products on Hopper: `cuda/fp8_decode.cu`."""

import ctypes
import math

import torch

from kernels.hopper import is_hopper
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode.attended import Attended
from kernels.mla_decode.parts import CUDA, HEADS, DividedWork, divide_work
from kernels.mla_decode.plan import DecodePlan
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = CUDA / "fp8_decode.cu"
Arguments = structure(SOURCE, "Arguments")
LATENT, WIDTH = 512, 576
THREADS = 512


def takes(query: torch.Tensor, pool: torch.Tensor, value_width: int) -> bool:
    """Whether this kernel computes it: DeepSeek's widths, on Hopper."""
    return (
        pool.dtype == torch.float8_e4m3fn
        and query.dtype == torch.bfloat16
        and (value_width, pool.shape[2]) == (LATENT, WIDTH)
        and is_hopper(query.device)
    )


def attend(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float, kv_scale: float) -> Attended:
    tokens, heads, _ = query.shape
    device = query.device
    out = torch.empty(tokens, heads, LATENT, dtype=query.dtype, device=device)
    if not tokens:
        return Attended(out)
    divided = divide_work(plan, heads, out, BLOCK_TOKENS)
    name = "decode_single" if divided.row_tiles % 2 else "decode_pair"
    kernel = load_kernel(SOURCE, name, device.index or 0)
    divided.attend(kernel, THREADS, arguments(query, pool, divided, scale, kv_scale))
    return Attended(out, divided.pieces)


def arguments(
    query: torch.Tensor, pool: torch.Tensor, divided: DividedWork, scale: float, kv_scale: float
) -> ctypes.Structure:
    """`Arguments` of the source, for what the kernel takes."""
    latents, keys = _pool_boxes(pool.data_ptr(), pool.shape[0])
    return Arguments(
        latents=latents, keys=keys, queries=_query_boxes(query.data_ptr(), query.shape[0] * query.shape[1]),
        work=divided.work, pool=pool.data_ptr(), scale_log2=scale * math.log2(math.e), kv_scale=kv_scale,
    )  # fmt: skip


def _pool_boxes(pool: int, blocks: int) -> tuple[ctypes.Array[ctypes.c_uint64], ctypes.Array[ctypes.c_uint64]]:
    """The tensor maps of one layer's pool: a block's latents are read in four boxes, its keys in one."""
    rows = blocks * BLOCK_TOKENS
    latents = encode_rows(pool, rows, WIDTH, BLOCK_TOKENS, 128)
    return latents, encode_rows(pool, rows, WIDTH, BLOCK_TOKENS, 64)


def _query_boxes(query: int, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """The tensor map of the queries: 64 of them are read in 18 boxes."""
    return encode_rows(query, rows, WIDTH * 2, HEADS, 64)
