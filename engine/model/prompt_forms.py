"""In which form each row of prompts attends: absorbed, expanded, expanded with masks, sparsely, or to what indexers
select.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch

from engine.batch import Row
from engine.model.config import ModelConfig
from engine.model.context import AbsorbedRows, DeviceState
from engine.model.expanded_attention import ExpandedRows
from engine.model.indexed_rows import IndexedRows, RoundedLatents, cut_queries, indexed_rows, rounded_latents
from engine.model.masked_rows import MaskedRows, masked_is_cheaper
from engine.model.slots import slots_between
from engine.model.sparse_attention import MOST_SAMPLES, SparseMeter, SparseRow
from kernels.host_copy import to_device
from kernels.kv_copy import COMPRESSED
from kernels.mla_decode import DecodePlan, plan_decode
from kernels.mla_prefill import causal_mask, plan_prefill
from mesh.blocks import BLOCK_TOKENS, blocks_for

# How many tokens' keys and values are expanded at once for all heads; of more tokens, those of fewer heads. At
# DeepSeek's widths this takes 64 KiB a token, and 40 KiB more in FP8.
EXPANDED_TOKENS = 16384
# How many latents are rounded to e4m3 in the 0.25 us that a query saves which attends to some of them in FP8.
ROUNDED_FOR_A_QUERY = 256


def prompt_forms(
    config: ModelConfig, rows: Sequence[Row], stops: Sequence[int], state: DeviceState
) -> tuple[list[AbsorbedRows | IndexedRows], list[ExpandedRows], list[MaskedRows], list[SparseRow]]:
    """rows: of prompts, each in the form that takes fewer multiplications; stops: the step's index after the last token
    of each.
    """
    forms: list[AbsorbedRows | IndexedRows] = []
    expanded: list[ExpandedRows] = []
    masked: list[MaskedRows] = []
    sparse: list[SparseRow] = []
    # Neighbouring rows: one attention call takes them all.
    together: list[tuple[Row, int, int]] = []
    rounded = state.kv_pool.dtype == COMPRESSED

    def flush() -> None:
        if any(row.start for row, *_ in together):
            expanded.append(_expand_later(together, state, quantized=state.quantized_prompts))
        elif together:
            expanded.append(_expand_fresh(together, state))
        together.clear()

    for row, first, stop in _cut_where_sparse(config, rows, stops, state):
        if state.index_pool is not None and row.end > state.top_k:
            flush()
            selects = max(first, stop - (row.end - state.top_k))
            if _takes_mask(config, row.start, row.end, state):
                parts = tuple(_index_prompt(row, selects, stop, state))
                masked.append(_masked_rows(row, first, stop, parts, state))
            else:
                forms += _index_prompt(row, selects, stop, state, _rounded(row, stop - selects, state))
            continue
        if absorbed_is_cheaper(config, queries=stop - first, context=row.end):
            flush()
            forms.append(AbsorbedRows(first, stop, _prompt_plan(row, row.end, stop - first, state)))
        elif row.sparse is not None and state.sparse_meter is not None:
            flush()
            sparse.append(_attend_sparsely(config, row, row.sparse.recall, first, stop, state, state.sparse_meter))
        else:
            # Rows without a prefix attend to what they have just computed, but next to others to what the pool keeps of
            # it, which may be rounded.
            apart = rounded and together and bool(together[0][0].start) != bool(row.start)
            if apart or sum(each.end for each, *_ in together) + row.end > EXPANDED_TOKENS:
                flush()
            together.append((row, first, stop))
    flush()
    return forms, expanded, masked, sparse


def absorbed_is_cheaper(config: ModelConfig, *, queries: int, context: int) -> bool:
    """Whether a row of `queries` tokens, the last of `context`, takes fewer multiplications absorbed than expanded.

    Per head, expanding costs the projection for every token of the context, absorbing for every query only; but an
    absorbed score and value are as wide as the latent. At DeepSeek's widths a chunk below about 170 tokens after a
    long cached prefix is cheaper absorbed; a prompt without one never is.
    """
    projection = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    wider = config.latent_dim + config.kv_lora_rank - config.qk_head_dim - config.v_head_dim
    return projection * (context - queries) > wider * queries * context


def _cut_where_sparse(
    config: ModelConfig, rows: Sequence[Row], stops: Sequence[int], state: DeviceState
) -> Iterator[tuple[Row, int, int]]:
    """The rows and their spans of tokens, cut where attention begins to be sparse, or to be to what indexers select:
    the part before is an exact row. What indexers select is cut where masks are no longer cheaper; a part with a mask
    begins with the row, so that keys are expanded once.
    """
    for row, first in zip(rows, stops, strict=False):
        exact = _exact_until(row, state)
        masked = max(exact, state.masked_until)
        # There are no products with masks in e4m3.
        if not state.quantized_prompts and _takes_mask(config, row.start, min(row.end, masked), state):
            exact = row.start
        bounds = (row.start, exact, masked, row.end)
        for start, end in pairwise(min(max(bound, row.start), row.end) for bound in bounds):
            if start < end:
                part = _part_of_row(row, start, end, exact=end <= exact)
                yield part, first + start - row.start, first + end - row.start


def _takes_mask(config: ModelConfig, start: int, end: int, state: DeviceState) -> bool:
    """Whether a row's tokens [start, end) attend with a mask. Those before the first that selects see all keys."""
    queries = end - max(start, state.top_k)
    return queries > 0 and end <= state.masked_until and masked_is_cheaper(config, queries=queries, context=end)


def _part_of_row(row: Row, start: int, end: int, *, exact: bool) -> Row:
    """The row's tokens at positions [start, end). exact: whether their attention is, though the row's may be sparse."""
    if (start, end) == (row.start, row.end) and not (exact and row.sparse):
        return row
    tokens = row.token_ids[start - row.start : end - row.start]
    return msgspec.structs.replace(row, token_ids=tokens, start=start, sparse=None if exact else row.sparse)


def _exact_until(row: Row, state: DeviceState) -> int:
    """The position of the first token that may not attend to all before it."""
    if state.index_pool is not None:
        return state.top_k
    return row.end if row.sparse is None or state.sparse_meter is None else row.sparse.from_tokens


def _attend_sparsely(
    config: ModelConfig, row: Row, recall: float, first: int, stop: int, state: DeviceState, meter: SparseMeter
) -> SparseRow:
    queries, count = stop - first, min(MOST_SAMPLES, stop - first)
    # One in the middle of each of `count` equal parts of the row.
    sampled = (2 * np.arange(count, dtype=np.int64) + 1) * queries // (2 * count)
    return SparseRow(
        first,
        stop,
        start=row.start,
        slots=to_device(slots_between(row, 0, row.end), state.device),
        expanded=EXPANDED_TOKENS,
        recall=recall,
        # Any layer, as long as it differs from chunk to chunk.
        measured_layer=row.end // BLOCK_TOKENS % config.num_hidden_layers,
        meter=meter,
        sampled=to_device(sampled, state.device),
    )


def _index_prompt(
    row: Row, first: int, stop: int, state: DeviceState, rounded: RoundedLatents | None = None
) -> Iterator[IndexedRows]:
    for start, end in cut_queries(first, stop, row.end):
        yield indexed_rows(start, end, _prompt_plan(row, row.end - (stop - end), end - start, state), rounded)


def _rounded(row: Row, queries: int, state: DeviceState) -> RoundedLatents | None:
    """What the row's last `queries` tokens attend to if that is rounded for them; None if they read the pool."""
    stored = state.kv_pool.dtype == COMPRESSED
    if not state.quantized_prompts or stored or queries * ROUNDED_FOR_A_QUERY < row.end:
        return None
    return rounded_latents(_block_table(row, row.end, state))


def _prompt_plan(row: Row, context: int, queries: int, state: DeviceState) -> DecodePlan:
    """The plan of the last `queries` of the first `context` tokens of a row's request."""
    lengths = to_device(np.array([context], np.int32), state.device)
    # Other parts of the prompt may be written in the same step, and KV of other ranks' parts comes in it.
    return plan_decode(_block_table(row, context, state), lengths, queries, written_tokens=context)


def _block_table(row: Row, context: int, state: DeviceState) -> torch.Tensor:
    """[1, blocks] int32: those of the first `context` tokens of a row's request."""
    return to_device(np.array(row.block_ids[: blocks_for(context)], np.int32), state.device).unsqueeze(0)


def _expand_fresh(spans: Sequence[tuple[Row, int, int]], state: DeviceState) -> ExpandedRows:
    """spans: neighbouring rows, with the first and last token of each in the batch. All begin their prompts."""
    lengths = [stop - first for _, first, stop in spans]
    plan = plan_prefill(lengths, lengths, state.device, quantized=state.quantized_prompts)
    return ExpandedRows(spans[0][1], spans[-1][2], plan, known=None, expanded=EXPANDED_TOKENS)


def _expand_later(spans: Sequence[tuple[Row, int, int]], state: DeviceState, *, quantized: bool) -> ExpandedRows:
    """spans: as of `_expand_fresh`, but some go on with their prompts."""
    queries, keys = [stop - first for _, first, stop in spans], [row.end for row, *_ in spans]
    plan = plan_prefill(queries, keys, state.device, quantized=quantized)
    known = to_device(np.concatenate([slots_between(row, 0, row.end) for row, *_ in spans]), state.device)
    return ExpandedRows(spans[0][1], spans[-1][2], plan, known, EXPANDED_TOKENS)


def _masked_rows(row: Row, first: int, stop: int, parts: tuple[IndexedRows, ...], state: DeviceState) -> MaskedRows:
    spans = [(row, first, stop)]
    expanded = _expand_later(spans, state, quantized=False) if row.start else _expand_fresh(spans, state)
    return MaskedRows(expanded, parts, causal_mask(stop - first, row.end, state.device))
