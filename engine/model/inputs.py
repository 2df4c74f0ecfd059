"""From a step's plain rows to the tensors of one forward pass."""

from collections.abc import Sequence
from itertools import accumulate, takewhile

import torch

from engine.batch import Row
from engine.model.config import ModelConfig
from engine.model.context import Absorbed, Expanded, ForwardContext
from kernels.mla_decode import DecodePlan, plan_decode
from kernels.mla_prefill import plan_prefill
from mesh.blocks import BLOCK_TOKENS


def build_context(
    config: ModelConfig, rows: Sequence[Row], rotations: torch.Tensor, kv_pool: torch.Tensor
) -> ForwardContext:
    """The leading rows of one token decode together; each other row attends in the form that is cheaper for it.

    rotations: the table of `model_rotations`, at least as long as any row's end.
    """

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=kv_pool.device)

    decoding = sum(1 for _ in takewhile(lambda row: len(row.token_ids) == 1, rows))
    stops = list(accumulate(len(row.token_ids) for row in rows))
    absorbed, expanded = [], []
    if decoding:
        absorbed.append(Absorbed(first=0, stop=decoding, plan=_decode_plan(rows[:decoding], 1, kv_pool.device)))
    for row, stop in zip(rows[decoding:], stops[decoding:], strict=True):
        queries = len(row.token_ids)
        if absorbed_is_cheaper(config, queries=queries, context=row.end):
            plan = _decode_plan([row], queries, kv_pool.device)
            absorbed.append(Absorbed(first=stop - queries, stop=stop, plan=plan))
        else:
            known = tensor(_slots(row, range(row.end))) if row.start else None
            prompt = plan_prefill([queries], [row.end], kv_pool.device)
            expanded.append(Expanded(first=stop - queries, stop=stop, plan=prompt, known=known))

    return ForwardContext(
        token_ids=tensor([token_id for row in rows for token_id in row.token_ids]),
        rotations=rotations.index_select(0, tensor([position for row in rows for position in _positions(row)])),
        slots=tensor([slot for row in rows for slot in _slots(row, _positions(row))]),
        absorbed=absorbed,
        expanded=expanded,
        sampled=tensor([stop - 1 for row, stop in zip(rows, stops, strict=True) if row.sampling is not None]),
        kv_pool=kv_pool,
    )


def absorbed_is_cheaper(config: ModelConfig, *, queries: int, context: int) -> bool:
    """Whether a row of `queries` tokens, the last of `context`, takes fewer multiplications absorbed than expanded.

    Per head, expanding costs the projection for every token of the context, absorbing for every query only; but an
    absorbed score and value are as wide as the latent. At DeepSeek's widths a chunk below about 170 tokens behind a
    long cached prefix is cheaper absorbed, a prompt without one never.
    """
    projection = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    wider = config.latent_dim + config.kv_lora_rank - config.qk_head_dim - config.v_head_dim
    return projection * (context - queries) > wider * queries * context


def _positions(row: Row) -> range:
    return range(row.start, row.end)


def _slots(row: Row, positions: range) -> list[int]:
    """The pool slot of each of these positions."""
    return [row.block_ids[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS for position in positions]


def _decode_plan(rows: Sequence[Row], query_tokens: int, device: torch.device) -> DecodePlan:
    lengths = [row.end for row in rows]
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    table = [[*row.block_ids[:count], *[0] * (max(counts) - count)] for row, count in zip(rows, counts, strict=True)]
    return plan_decode(
        torch.tensor(table, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        query_tokens,
    )
