"""The indexer's scores with FP8 products on Hopper: `cuda/scores.cu` for decode, `cuda/prompt_scores.cu` else."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.index_keys import SCALE_BYTES, IndexQueries
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

CUDA = Path(__file__).parent / "cuda"


@dataclass(frozen=True, slots=True)
class Form:
    source: Path
    # The kernels', with the number of heads after it.
    name: str
    threads: int
    # On a multiprocessor.
    ctas: int


FEW_QUERIES = Form(CUDA / "scores.cu", "index_scores", threads=288, ctas=2)
MANY_QUERIES = Form(CUDA / "prompt_scores.cu", "prompt_scores", threads=640, ctas=1)
Arguments = structure(CUDA / "units.cuh", "Arguments")
# Queries of a row that are scored together. Rows of more take the form for many.
TOGETHER = 4
# Heads of DeepSeek-V3.2's indexers and of GLM-5's. A kernel each.
HEADS = 64, 32
WIDTH = 128
# Rows of WIDTH bytes in a block of keys and their scales.
BLOCK_ROWS = BLOCK_TOKENS * (WIDTH + SCALE_BYTES) // WIDTH


def takes(queries: IndexQueries, pool: torch.Tensor) -> bool:
    """Whether this kernel computes it: quantized keys of DeepSeek-V3.2's width, on Hopper."""
    heads, width = queries.values.shape[1:]
    return pool.dtype == torch.uint8 and heads in HEADS and width == WIDTH and is_hopper(pool.device)


def index_scores(queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan, out: torch.Tensor) -> None:
    (tokens, heads, _), device = queries.values.shape, pool.device
    if not tokens:
        return
    arguments = Arguments(
        pool_boxes=encode_rows(pool.data_ptr(), len(pool) * BLOCK_ROWS, WIDTH, BLOCK_TOKENS, WIDTH),
        query_boxes=encode_rows(queries.values.data_ptr(), tokens * heads, WIDTH, heads, WIDTH),
        pool=pool.data_ptr(), weights=queries.weights.data_ptr(), block_table=plan.block_table.data_ptr(),
        lengths=plan.lengths.data_ptr(), out=out.data_ptr(), rows=plan.rows, table_stride=plan.block_table.stride(0),
        query_tokens=plan.query_tokens, out_width=out.shape[1],
    )  # fmt: skip
    form = FEW_QUERIES if plan.query_tokens <= TOGETHER else MANY_QUERIES
    kernel = load_kernel(form.source, f"{form.name}_{heads}", device.index or 0)
    kernel.launch((form.ctas * processors(device), 1, 1), form.threads, arguments, dependent=True)
