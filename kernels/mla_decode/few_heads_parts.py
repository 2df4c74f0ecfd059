"""Our decode attention of one query of each request with few heads over a bf16 pool on Hopper:
`cuda/few_heads_parts.cu`.
"""

import math

import torch

from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import FEW_HEADS, bf16
from kernels.mla_decode.attended import Attended
from kernels.mla_decode.bf16 import LATENT, WIDTH
from kernels.mla_decode.parts import CUDA, divide_work
from kernels.mla_decode.plan import DecodePlan
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = CUDA / "few_heads_parts.cu"
Arguments = structure(SOURCE, "Arguments")
# Numbers of heads that kernels are compiled for.
TILES = (16, 24)
# As in the source.
THREADS = 256


def takes(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, value_width: int) -> bool:
    """Whether each request has one query with few heads, of what `bf16` takes."""
    return plan.query_tokens == 1 and query.shape[1] <= FEW_HEADS and bf16.takes(query, pool, value_width)


def attend(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> Attended:
    """As `bf16.attend`, for what it `takes`."""
    tokens, heads, _ = query.shape
    device, tile = query.device, next(size for size in TILES if size >= heads)
    out = torch.empty(tokens, heads, LATENT, dtype=query.dtype, device=device)
    if not tokens:
        return Attended(out)
    divided = divide_work(plan, heads, out, BLOCK_TOKENS)
    arguments = Arguments(
        pool_boxes=encode_rows(pool.data_ptr(), pool.shape[0] * BLOCK_TOKENS, WIDTH * 2, BLOCK_TOKENS, 128),
        query_boxes=encode_rows(query.data_ptr(), tokens * heads, WIDTH * 2, tile, 128), work=divided.work,
        pool=pool.data_ptr(), scale_log2=scale * math.log2(math.e), written=plan.written_tokens,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"attend_parts_{tile}_heads", device.index or 0)
    divided.attend(kernel, THREADS, arguments)
    return Attended(out, divided.pieces)
