"""From a step's plain rows to the tensors of one forward pass. Nothing here waits for the device."""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise, takewhile

import numpy as np
import torch

from engine.batch import Row
from engine.model.config import ModelConfig
from engine.model.context import AbsorbedRows, DeviceState, ForwardContext
from engine.model.decode_inputs import DecodeRows, pack_decode_rows, unpack_decode_rows
from engine.model.indexed_rows import IndexedRows, indexed_rows
from engine.model.prompt_forms import prompt_forms
from engine.model.slots import written_slots
from kernels.host_copy import to_device
from kernels.mla_decode import plan_decode
from mesh.blocks import BLOCK_TOKENS, blocks_for

# By token, the first four of `PlacedTokens`.
TokenTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def build_context(
    config: ModelConfig, rows: Sequence[Row], state: DeviceState, size: int | None = None
) -> ForwardContext:
    """The leading rows that draw after one token, or after one token and equally many drafts, decode together; every
    other row attends in its cheaper form.

    size: the number of tokens to which the step is padded; None pads nothing.
    """
    # A row that draws nothing may be a piece of a chunk that ranks divide, whose keys come layer by layer.
    decoding = list(takewhile(lambda row: row.decodes and row.sampling is not None and not row.shared, rows))
    groups = decode_groups(decoding, state, blocks_of(decoding))
    sampled = to_device(np.array(last_tokens(rows), np.int64), state.device)
    return join_context(config, groups, rows[len(decoding) :], state, size, sampled=sampled)


def blocks_of(rows: Sequence[Row], more: int = 0) -> int:
    """The most blocks of any row, with room for `more` tokens after its own."""
    return blocks_for(max((row.end for row in rows), default=0) + more)


def decode_groups(rows: Sequence[Row], state: DeviceState, blocks: int) -> list[DecodeRows]:
    """Rows that decode, neighbours with equally many drafts together. Their tables are `blocks` wide; blocks that a row
    lacks are the padding block.
    """
    return [_decode_group(list(group), blocks, state) for _, group in groupby(rows, key=lambda row: row.drafts)]


def join_context(
    config: ModelConfig,
    decoding: Sequence[DecodeRows],
    prompts: Sequence[Row],
    state: DeviceState,
    size: int | None = None,
    sampled: torch.Tensor | None = None,
) -> ForwardContext:
    """The context of rows that decode, and then of others. size: as in `build_context`."""
    placed = [rows.placed(state) for rows in decoding]
    parts: list[TokenTensors] = [each[:4] for each in placed]
    spans = list(pairwise(accumulate((rows.rows * rows.row_tokens for rows in decoding), initial=0)))
    forms = [
        _decode_form(rows, each.lengths, *span, state) for rows, each, span in zip(decoding, placed, spans, strict=True)
    ]
    if prompts:
        parts.append(_prompt_tensors(prompts, state))
    decoding_tokens = spans[-1][1] if spans else 0
    stops = list(accumulate((row.tokens for row in prompts), initial=decoding_tokens))
    padding = 0 if size is None else size - stops[-1]
    if padding:
        parts.append(_padding_tensors(padding, state))
    token_ids, rotations, slots, real = (
        tensors[0] if len(tensors) == 1 else torch.cat(tensors) for tensors in zip(*parts, strict=True)
    )
    absorbed, expanded, masked, sparse = prompt_forms(config, prompts, stops, state)
    forms += absorbed
    return ForwardContext(
        token_ids=token_ids,
        rotations=rotations,
        slots=slots,
        real=real,
        absorbed=_absorbed(forms),
        expanded=expanded,
        sampled=sampled,
        kv_pool=state.kv_pool,
        kv_scale=state.kv_scale,
        workspace=state.workspace,
        padding=padding,
        decoding=decoding_tokens,
        index_pool=state.index_pool,
        indexed=_indexed(forms),
        masked=masked,
        sparse=sparse,
    )


def decode_context(rows: DecodeRows, state: DeviceState, step_tokens: int | None = None) -> ForwardContext:
    """The context of rows that decode and all want logits. Made of tensors alone, so a graph can capture it.

    step_tokens: of the step that the rows are a part of; None if they are all of it.
    """
    token_ids, rotations, slots, real, lengths = rows.placed(state)
    tokens = rows.rows * rows.row_tokens
    forms = [_decode_form(rows, lengths, 0, tokens, state, step_tokens)]
    return ForwardContext(
        token_ids=token_ids,
        rotations=rotations,
        slots=slots,
        real=real,
        absorbed=_absorbed(forms),
        expanded=[],
        sampled=None,
        kv_pool=state.kv_pool,
        kv_scale=state.kv_scale,
        workspace=state.workspace,
        decoding=tokens,
        index_pool=state.index_pool,
        indexed=_indexed(forms),
    )


def _decode_group(rows: Sequence[Row], blocks: int, state: DeviceState) -> DecodeRows:
    drafts = rows[0].drafts
    packed = to_device(pack_decode_rows(rows, len(rows), blocks, state.padding_block, drafts), state.device)
    return unpack_decode_rows(packed, len(rows), drafts).known(state)


def _decode_form(
    rows: DecodeRows,
    lengths: torch.Tensor,
    first: int,
    stop: int,
    state: DeviceState,
    step_tokens: int | None = None,
) -> AbsorbedRows | IndexedRows:
    """Rows attend to all tokens if none can have more than indexers select: their table is not wide enough. That does
    not depend on lengths, which a captured graph reads when it runs.
    """
    plan = plan_decode(rows.block_table, lengths, rows.row_tokens, step_tokens)
    if state.index_pool is None or rows.block_table.shape[1] * BLOCK_TOKENS <= state.top_k:
        return AbsorbedRows(first, stop, plan)
    return indexed_rows(first, stop, plan)


def _absorbed(forms: Sequence[AbsorbedRows | IndexedRows]) -> list[AbsorbedRows]:
    return [rows for rows in forms if isinstance(rows, AbsorbedRows)]


def _indexed(forms: Sequence[AbsorbedRows | IndexedRows]) -> list[IndexedRows]:
    return [rows for rows in forms if isinstance(rows, IndexedRows)]


def _prompt_tensors(rows: Sequence[Row], state: DeviceState) -> TokenTensors:
    token_ids = np.concatenate([np.asarray(row.token_ids, np.int64) for row in rows])
    positions = np.concatenate([np.arange(row.start, row.end, dtype=np.int32) for row in rows])
    slots = np.concatenate([written_slots(row, state.padding_block) for row in rows])
    real = torch.ones(len(token_ids), dtype=torch.bool, device=state.device)
    device = state.device
    rotations = state.rotations.index_select(0, to_device(positions, device))
    return to_device(token_ids, device), rotations, to_device(slots, device), real


def _padding_tensors(tokens: int, state: DeviceState) -> TokenTensors:
    """As `_prompt_tensors`, for tokens that belong to no row: all of them share one slot of the padding block."""
    zeros = torch.zeros(tokens, dtype=torch.int64, device=state.device)
    rotations = state.rotations[:1].repeat(tokens, 1)
    return zeros, rotations, zeros + state.padding_block * BLOCK_TOKENS, zeros.bool()


def last_tokens(rows: Sequence[Row]) -> list[int]:
    """Indices of the last tokens of rows that draw."""
    stops = accumulate(row.tokens for row in rows)
    return [stop - 1 for row, stop in zip(rows, stops, strict=True) if row.sampling is not None]
