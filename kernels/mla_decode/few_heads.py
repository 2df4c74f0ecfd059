"""Our decode attention of one token with few heads over a bf16 pool on Hopper: `cuda/few_heads.cu`."""

import math

import torch

from kernels.hopper import processors
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import FEW_HEADS, bf16
from kernels.mla_decode.attended import Attended
from kernels.mla_decode.bf16 import LATENT, WIDTH
from kernels.mla_decode.parts import CUDA, DividedWork, Work
from kernels.mla_decode.plan import DecodePlan
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = CUDA / "few_heads.cu"
# Numbers of heads that kernels are compiled for.
TILES = (16, 32)
Arguments = structure(SOURCE, "Arguments")
# The most blocks that a context may have. Its CTAs, half of a chip's, read longer ones more slowly than memory could.
MOST_BLOCKS = 160
# As in the source. Each cluster leaves a piece.
CTAS, CLUSTERS, THREADS = 4, 16, 256
# The only schedule: no kernel makes one.
EVEN = "even"


def takes(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, value_width: int) -> bool:
    """Whether there is one token with few heads, and no long context, of what `bf16` takes."""
    few = len(query) == 1 and query.shape[1] <= FEW_HEADS and plan.block_table.shape[1] <= MOST_BLOCKS
    return few and bf16.takes(query, pool, value_width)


def attend(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> Attended:
    """As `bf16.attend`, for what it `takes`."""
    tokens, heads, _ = query.shape
    device, tile = query.device, next(size for size in TILES if size >= heads)
    assert tokens == plan.rows == plan.query_tokens == 1
    out = torch.empty(tokens, heads, LATENT, dtype=query.dtype, device=device)
    values = torch.empty(CLUSTERS, heads, LATENT, dtype=query.dtype, device=device)
    log_sums = torch.empty(CLUSTERS, heads, dtype=torch.float32, device=device)
    work = Work(
        block_table=plan.block_table.data_ptr(), lengths=plan.lengths.data_ptr(), out=out.data_ptr(),
        values=values.data_ptr(), log_sums=log_sums.data_ptr(), requests=1, query_tokens=1, heads=heads,
        part_count=CLUSTERS, unit_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    arguments = Arguments(
        pool_boxes=encode_rows(pool.data_ptr(), pool.shape[0] * BLOCK_TOKENS, WIDTH * 2, BLOCK_TOKENS, 128),
        query_boxes=encode_rows(query.data_ptr(), heads, WIDTH * 2, tile, 128), work=work, pool=pool.data_ptr(),
        scale_log2=scale * math.log2(math.e), written=plan.written_tokens,
    )  # fmt: skip
    # A kernel launched as a dependent one reads the plan before it waits, so a new plan must be complete.
    follows = plan.schedule.metadata == EVEN
    plan.schedule.metadata = EVEN
    kernel = load_kernel(SOURCE, f"attend_{tile}_heads", device.index or 0)
    kernel.launch((CTAS * CLUSTERS, 1, 1), THREADS, arguments, cluster=CTAS, dependent=follows)
    return Attended(out, DividedWork(work, 1, processors(device), follows, (values, log_sums)))
