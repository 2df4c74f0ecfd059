"""The indexer's scores in plain torch: the definition."""

import torch

from kernels.index_keys import IndexQueries, read_keys
from kernels.mla_decode import DecodePlan
from kernels.mla_decode.plan import context_runs

# The most products of a head that are held at a time, over all heads and tokens.
MOST_PRODUCTS = 1 << 22


def index_scores(queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan, out: torch.Tensor) -> None:
    rows = plan.runs if plan.runs is not None else context_runs(plan.block_table, plan.lengths)
    values, weights = queries.values.float(), queries.weights.unsqueeze(1)
    for row, runs in enumerate(rows):
        slots = torch.cat([torch.arange(run.start, run.stop, device=pool.device) for run in runs])
        keys = read_keys(pool, slots).float().t()
        own = slice(row * plan.query_tokens, (row + 1) * plan.query_tokens)
        few = max(MOST_PRODUCTS // (values.shape[1] * len(slots)), 1)
        for first in range(own.start, own.stop, few):
            some = slice(first, min(first + few, own.stop))
            products = torch.relu(values[some] @ keys)
            out[some, : len(slots)] = (weights[some] @ products).squeeze(1)
