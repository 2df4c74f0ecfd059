"""Our decode attention over a bf16 pool on Hopper: `cuda/bf16_decode.cu`."""

import ctypes
import math

import torch

from kernels.few_rows import are_few
from kernels.hopper import is_hopper
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode.attended import Attended
from kernels.mla_decode.parts import CUDA, DividedWork, divide_work
from kernels.mla_decode.plan import DecodePlan
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = CUDA / "bf16_decode.cu"
Arguments = structure(SOURCE, "Arguments")
LATENT, WIDTH = 512, 576
THREADS = 512


def takes(query: torch.Tensor, pool: torch.Tensor, value_width: int) -> bool:
    """Whether this kernel computes it: DeepSeek's widths, on Hopper."""
    return (
        pool.dtype == query.dtype == torch.bfloat16
        and (value_width, pool.shape[2]) == (LATENT, WIDTH)
        and is_hopper(query.device)
    )


def attend(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> Attended:
    tokens, heads, _ = query.shape
    device = query.device
    out = torch.empty(tokens, heads, LATENT, dtype=query.dtype, device=device)
    if not tokens:
        return Attended(out)
    divided = divide_work(plan, heads, out, BLOCK_TOKENS)
    name = "decode_single" if divided.row_tiles % 2 else "decode_pair"
    divided.attend(load_kernel(SOURCE, name, device.index or 0), THREADS, arguments(query, pool, divided, scale))
    return Attended(out, divided.pieces)


def arguments(query: torch.Tensor, pool: torch.Tensor, divided: DividedWork, scale: float) -> ctypes.Structure:
    """`Arguments` of the source, for what the kernel takes."""
    return Arguments(
        pool_boxes=_boxes(pool.data_ptr(), pool.shape[0] * BLOCK_TOKENS),
        query_boxes=_boxes(query.data_ptr(), query.shape[0] * query.shape[1]), work=divided.work, pool=pool.data_ptr(),
        query=query.data_ptr(), scale_log2=scale * math.log2(math.e), few=int(are_few(query)),
    )  # fmt: skip


def _boxes(address: int, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """The tensor map of rows of latents or queries, for boxes of 64 rows of 64 values."""
    return encode_rows(address, rows, WIDTH * 2, BLOCK_TOKENS, 128)
