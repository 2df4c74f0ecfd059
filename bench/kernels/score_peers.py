"""Index scores by deep_gemm's own kernels, for one query a row and for the queries of one prompt.

They read keys as ours do, paged for rows that decode; a prompt's they read in order, apart from their scales.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from kernels.fp8_gemm import deep_gemm
from kernels.index_keys import SCALE_BYTES, IndexQueries
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan

# Gives [queries, tokens] float32.
Score = Callable[[], torch.Tensor]

available = deep_gemm.available


def scores(queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan) -> Score:
    """Arguments as of `index_scores`: keys in e4m3, and one query a row or one row."""
    package = import_module(deep_gemm.PACKAGE)
    return _of_prompt(package, queries, pool, plan) if plan.rows == 1 else _of_rows(package, queries, pool, plan)


def _of_rows(package: Any, queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan) -> Score:
    assert plan.query_tokens == 1
    lengths = plan.lengths.unsqueeze(1)
    schedule = package.get_paged_mqa_logits_metadata(lengths, BLOCK_TOKENS, package.get_num_sms())
    values, keys = queries.values.unsqueeze(1), pool.unsqueeze(2)
    most = BLOCK_TOKENS * plan.block_table.shape[1]

    def score() -> torch.Tensor:
        found: torch.Tensor = package.fp8_paged_mqa_logits(
            values, keys, queries.weights, lengths, plan.block_table, schedule, most, clean_logits=False
        )
        return found

    return score


def _of_prompt(package: Any, queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan) -> Score:
    blocks = pool[plan.block_table[0].long()].flatten(1)
    width = pool.shape[2] - SCALE_BYTES
    keys = blocks[:, : BLOCK_TOKENS * width].reshape(-1, width).view(torch.float8_e4m3fn)
    scales = blocks[:, BLOCK_TOKENS * width :].contiguous().view(torch.float32).flatten()
    last = plan.lengths + torch.arange(1 - plan.query_tokens, 1, dtype=torch.int32, device=pool.device)
    first = torch.zeros_like(last)

    def score() -> torch.Tensor:
        found: torch.Tensor = package.fp8_mqa_logits(
            queries.values, (keys, scales), queries.weights, first, last, clean_logits=False
        )
        return found

    return score
