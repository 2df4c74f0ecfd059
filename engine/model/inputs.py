"""From a step's plain rows to the tensors of one forward pass. Nothing here waits for the device."""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise, takewhile

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Row
from engine.model.config import ModelConfig
from engine.model.context import AbsorbedRows, DeviceState, ExpandedRows, ForwardContext, PrefixPart
from engine.model.decode_inputs import DecodeInputs, pack_decode_rows, unpack_decode_rows
from kernels.host_copy import to_device
from kernels.mla_decode import plan_decode
from kernels.mla_prefill import plan_prefill
from mesh.blocks import BLOCK_TOKENS

# Tokens whose keys and values are expanded at once: at DeepSeek's widths 64 KiB and 80 KiB a token.
EXPANDED_TOKENS = 16384


def build_context(
    config: ModelConfig, rows: Sequence[Row], state: DeviceState, size: int | None = None
) -> ForwardContext:
    """The leading rows of one token decode together, so do neighbours with equally many drafts; every other row attends
    in its cheaper form.

    size: the number of tokens to which the step is padded; None pads nothing.
    """
    decoding = sum(1 for _ in takewhile(lambda row: row.end - row.start == 1 and not row.shared, rows))
    prompts = rows[decoding:]
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    absorbed: list[AbsorbedRows] = []
    if decoding:
        blocks = max(-(-row.end // BLOCK_TOKENS) for row in rows[:decoding])
        packed = to_device(pack_decode_rows(rows[:decoding], decoding, blocks, state.padding_block), state.device)
        inputs = unpack_decode_rows(packed, decoding)
        parts.append((inputs.token_ids(state.drawn), inputs.positions, inputs.slots()))
        absorbed.append(_absorb_decode(inputs))
    if prompts:
        parts.append(_prompt_tensors(prompts, state))
    stops = list(accumulate((row.end - row.start for row in prompts), initial=decoding))
    padding = 0 if size is None else size - stops[-1]
    if padding:
        parts.append(_padding_tensors(padding, state))
    token_ids, positions, slots = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    absorbed_prompts, expanded = _attention_of_prompts(config, prompts, stops, state)
    return ForwardContext(
        token_ids=token_ids,
        rotations=state.rotations.index_select(0, positions),
        slots=slots,
        absorbed=absorbed + absorbed_prompts,
        expanded=expanded,
        sampled=_sampled(rows, decoding, stops, state),
        kv_pool=state.kv_pool,
        kv_scale=state.kv_scale,
        workspace=state.workspace,
        padding=padding,
    )


def decode_context(inputs: DecodeInputs, state: DeviceState) -> ForwardContext:
    """The context of rows of one token each that all want logits. Made of tensors alone, so a graph can capture it."""
    return ForwardContext(
        token_ids=inputs.token_ids(state.drawn),
        rotations=state.rotations.index_select(0, inputs.positions),
        slots=inputs.slots(),
        absorbed=[_absorb_decode(inputs)],
        expanded=[],
        sampled=None,
        kv_pool=state.kv_pool,
        kv_scale=state.kv_scale,
        workspace=state.workspace,
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


def _absorb_decode(inputs: DecodeInputs) -> AbsorbedRows:
    plan = plan_decode(inputs.block_table, inputs.lengths())
    return AbsorbedRows(first=0, stop=plan.rows, plan=plan)


def _prompt_tensors(rows: Sequence[Row], state: DeviceState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens int64, positions int32 and slots int64 of all tokens of these rows."""
    token_ids = np.concatenate([np.asarray(row.token_ids, np.int64) for row in rows])
    positions = np.concatenate([np.arange(row.start, row.end, dtype=np.int32) for row in rows])
    slots = np.concatenate([_written_slots(row, state.padding_block) for row in rows])
    return to_device(token_ids, state.device), to_device(positions, state.device), to_device(slots, state.device)


def _padding_tensors(tokens: int, state: DeviceState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for tokens that belong to no row: all of them share one slot of the padding block."""
    zeros = torch.zeros(tokens, dtype=torch.int64, device=state.device)
    return zeros, zeros.int(), zeros + state.padding_block * BLOCK_TOKENS


def _written_slots(row: Row, padding_block: int) -> npt.NDArray[np.int64]:
    """The pool slot that each token's KV goes to: those in shared blocks keep theirs."""
    slots = _slots(row, row.start, row.end)
    slots[: row.shared] = padding_block * BLOCK_TOKENS
    return slots


def _slots(row: Row, start: int, stop: int) -> npt.NDArray[np.int64]:
    """The pool slot of each position from `start` to `stop`."""
    positions = np.arange(start, stop, dtype=np.int64)
    blocks = np.array(row.block_ids[: -(-stop // BLOCK_TOKENS)], dtype=np.int64)
    return blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS


def _sampled(rows: Sequence[Row], decoding: int, stops: Sequence[int], state: DeviceState) -> torch.Tensor:
    """Indices of the last tokens of rows that draw."""
    last = [*range(decoding), *(stop - 1 for stop in stops[1:])]
    wanted = [index for row, index in zip(rows, last, strict=True) if row.sampling is not None]
    return to_device(np.array(wanted, np.int64), state.device)


def _attention_of_prompts(
    config: ModelConfig, rows: Sequence[Row], stops: Sequence[int], state: DeviceState
) -> tuple[list[AbsorbedRows], list[ExpandedRows]]:
    absorbed: list[AbsorbedRows] = []
    expanded: list[ExpandedRows] = []
    done = 0
    for drafts, neighbours in groupby(rows, key=lambda row: row.drafts):
        group = list(neighbours)
        spans = stops[done : done + len(group) + 1]
        done += len(group)
        if drafts:
            absorbed.append(_absorb_drafts(group, spans[0], spans[-1], state))
            continue
        more_absorbed, more_expanded = _attention_without_drafts(config, group, spans, state)
        absorbed += more_absorbed
        expanded += more_expanded
    return absorbed, expanded


def _attention_without_drafts(
    config: ModelConfig, rows: Sequence[Row], stops: Sequence[int], state: DeviceState
) -> tuple[list[AbsorbedRows], list[ExpandedRows]]:
    absorbed: list[AbsorbedRows] = []
    expanded: list[ExpandedRows] = []
    # Neighbouring rows without a cached prefix: one attention call takes them all.
    fresh: list[tuple[int, int]] = []

    def flush() -> None:
        if fresh:
            expanded.append(_expand_fresh(fresh, state))
            fresh.clear()

    for row, (first, stop) in zip(rows, pairwise(stops), strict=True):
        if not row.start and stop - (fresh[0][0] if fresh else first) <= EXPANDED_TOKENS:
            fresh.append((first, stop))
            continue
        flush()
        if not row.start:
            fresh.append((first, stop))
        elif absorbed_is_cheaper(config, queries=stop - first, context=row.end):
            absorbed.append(_absorb_prompt(row, first, stop, state))
        else:
            expanded.append(_expand_behind_prefix(row, first, stop, state))
    flush()
    return absorbed, expanded


def _absorb_drafts(rows: Sequence[Row], first: int, stop: int, state: DeviceState) -> AbsorbedRows:
    """Rows of equally many tokens."""
    table = np.zeros((len(rows), max(-(-row.end // BLOCK_TOKENS) for row in rows)), np.int32)
    for index, row in enumerate(rows):
        count = -(-row.end // BLOCK_TOKENS)
        table[index, :count] = row.block_ids[:count]
    lengths = to_device(np.array([row.end for row in rows], np.int32), state.device)
    return AbsorbedRows(first, stop, plan_decode(to_device(table, state.device), lengths, rows[0].tokens))


def _absorb_prompt(row: Row, first: int, stop: int, state: DeviceState) -> AbsorbedRows:
    blocks = np.array(row.block_ids[: -(-row.end // BLOCK_TOKENS)], np.int32)
    lengths = to_device(np.array([row.end], np.int32), state.device)
    return AbsorbedRows(first, stop, plan_decode(to_device(blocks, state.device).unsqueeze(0), lengths, stop - first))


def _expand_fresh(spans: Sequence[tuple[int, int]], state: DeviceState) -> ExpandedRows:
    lengths = [stop - first for first, stop in spans]
    plan = plan_prefill(lengths, lengths, state.device)
    return ExpandedRows(first=spans[0][0], stop=spans[-1][1], plan=plan, known=None, earlier=[])


def _expand_behind_prefix(row: Row, first: int, stop: int, state: DeviceState) -> ExpandedRows:
    """The row with as much of its prefix as can be expanded at once; the rest of the prefix in earlier parts."""
    queries = stop - first
    begin = min(max(row.end - EXPANDED_TOKENS, 0), row.start)
    plan = plan_prefill([queries], [row.end - begin], state.device)
    bounds = [*range(0, begin, EXPANDED_TOKENS), begin]
    earlier = [
        PrefixPart(
            slots=to_device(_slots(row, start, end), state.device),
            plan=plan_prefill([queries], [end - start], state.device, causal=False),
        )
        for start, end in pairwise(bounds)
    ]
    return ExpandedRows(first, stop, plan, known=to_device(_slots(row, begin, row.end), state.device), earlier=earlier)
