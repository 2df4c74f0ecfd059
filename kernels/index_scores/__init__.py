"""Scores of the lightning indexer: how much each query wants to attend to each token before it.

DeepSeek-V3.2 (DeepSeek-AI, 2025), section 2.1, equation 1: the sum over the index heads of weight * ReLU(query . key).
"""

import torch

from kernels.index_keys import SCALE_BYTES, IndexQueries
from kernels.index_scores import reference
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan


def index_scores(queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    """[rows * query_tokens, 64 * blocks of the plan's table] float32: by query, the scores of its row's tokens by their
    position. What is after a query's own position is undefined.

    queries: of the plan's rows, row by row; pool: [blocks, 64, ...] contiguous, the index keys of one layer, in which
    those of the queries' own tokens were written before the queries were made. Rows may be requests that decode, or
    prompts after a cached prefix.
    """
    tokens, _, width = queries.values.shape
    assert (
        tokens == plan.rows * plan.query_tokens and queries.values.is_contiguous() and queries.weights.is_contiguous()
    )
    assert pool.is_contiguous() and pool.shape[1] == BLOCK_TOKENS
    assert pool.shape[2] == width + (SCALE_BYTES if pool.dtype == torch.uint8 else 0)
    scores = torch.empty(
        tokens, BLOCK_TOKENS * plan.block_table.shape[1], dtype=torch.float32, device=queries.values.device
    )
    if queries.values.is_cuda:
        # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
        from kernels.index_scores import triton, warpgroups

        form = warpgroups if warpgroups.takes(queries, pool) else triton
        form.index_scores(queries, pool, plan, scores)
    else:
        reference.index_scores(queries, pool, plan, scores)
    return scores
