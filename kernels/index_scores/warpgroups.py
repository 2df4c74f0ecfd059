"""The indexer's scores with FP8 products on Hopper, for decode and prompts: `cuda/scores.cu`."""

from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.index_keys import SCALE_BYTES, IndexQueries
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "scores.cu"
Arguments = structure(SOURCE, "Arguments")
HEADS, WIDTH, THREADS, CTAS = 64, 128, 288, 2
# Rows of WIDTH bytes in a block of keys and their scales.
BLOCK_ROWS = BLOCK_TOKENS * (WIDTH + SCALE_BYTES) // WIDTH


def takes(queries: IndexQueries, pool: torch.Tensor) -> bool:
    """Whether this kernel computes it: quantized keys of DeepSeek-V3.2's shape, on Hopper."""
    return pool.dtype == torch.uint8 and queries.values.shape[1:] == (HEADS, WIDTH) and is_hopper(pool.device)


def index_scores(queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan, out: torch.Tensor) -> None:
    tokens, device = len(queries.values), pool.device
    if not tokens:
        return
    arguments = Arguments(
        pool_boxes=encode_rows(pool.data_ptr(), len(pool) * BLOCK_ROWS, WIDTH, BLOCK_TOKENS, WIDTH),
        query_boxes=encode_rows(queries.values.data_ptr(), tokens * HEADS, WIDTH, HEADS, WIDTH),
        pool=pool.data_ptr(), weights=queries.weights.data_ptr(), block_table=plan.block_table.data_ptr(),
        lengths=plan.lengths.data_ptr(), out=out.data_ptr(), rows=plan.rows, table_stride=plan.block_table.stride(0),
        query_tokens=plan.query_tokens, out_width=out.shape[1],
    )  # fmt: skip
    kernel = load_kernel(SOURCE, "index_scores", device.index or 0)
    kernel.launch((CTAS * processors(device), 1, 1), THREADS, arguments, dependent=True)
