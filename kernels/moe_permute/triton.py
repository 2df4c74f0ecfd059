"""Permutation of tokens by expert in Triton."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import Quantized, empty_quantized
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.moe_permute.experts import ExpertOutputs
from kernels.moe_permute.layout import NOWHERE, PADDING, ContiguousLayout, ExpandedQuantized
from kernels.moe_permute.reference import RowsByExpert
from kernels.moe_permute.triton_masked import empty_masked, place_copies, scale_stride
from kernels.tile_sizes import cdiv, next_power_of_2

# The most elements of a program's table [choices, experts], and up to how many one program sees all choices. Between
# them it takes few: half as many, or those of `FEWEST` choices, or as many as make `PROGRAMS` programs, each of which
# reads the counts of all. In one program 64 tokens of Moonlight were placed and copied in 11.6 us, so in 4.7.
TABLE, ALL_AT_ONCE, FEWEST, PROGRAMS = 1 << 15, 1 << 13, 64, 128
# The most choices of a program, which compares all with each other: 512 would be compiled for half a minute.
MOST_CHOICES = 256
# How many programs have their counts loaded before these are added up.
TOGETHER = tl.constexpr(16)
# Values of a row that one program copies or sums: 16 bytes a thread.
COPIED_WIDTH, SUMMED_WIDTH = 2048, 1024


@triton.jit
def _chosen(experts, choices, first, expert_count, CHUNK: tl.constexpr):
    """This program's choices: their indices, and which placed expert each one names, or -1."""
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + index, mask=index < choices, other=-1).to(tl.int32) - first
    return index, tl.where((index < choices) & (chosen >= 0) & (chosen < expert_count), chosen, -1)


@triton.jit
def _counts(chosen, EXPERTS: tl.constexpr):
    """[EXPERTS]: how many of these choices name each expert."""
    return tl.sum((chosen[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32), axis=0)


# A program counts the experts of CHUNK choices. Reads 8 bytes a choice.
@triton.jit(do_not_specialize=["choices", "first", "expert_count"])
def _count(
    experts, chunk_counts, choices, first, expert_count,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    _, chosen = _chosen(experts, choices, first, expert_count, CHUNK)
    tl.store(chunk_counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), _counts(chosen, EXPERTS))


@triton.jit
def _totals(chosen, chunk_counts, SINGLE: tl.constexpr, EXPERTS: tl.constexpr):
    """For each expert, the choices of all programs, and of the programs before this one."""
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    if SINGLE:
        total += _counts(chosen, EXPERTS)
    else:
        for first in range(0, tl.num_programs(0), TOGETHER):
            for other in tl.static_range(TOGETHER):
                chunk = first + other
                stop = tl.where(chunk < tl.num_programs(0), EXPERTS, 0)
                expert = tl.arange(0, EXPERTS)
                found = tl.load(chunk_counts + chunk * EXPERTS + expert, mask=expert < stop, other=0)
                total += found
                before += tl.where(chunk < tl.program_id(0), found, 0)
    return total, before


@triton.jit
def _positions(chosen, starts, NOWHERE: tl.constexpr, CHUNK: tl.constexpr):
    """Rows of this program's choices, int64: those of an expert one after another from `starts` [EXPERTS] on."""
    order = tl.arange(0, CHUNK)
    earlier = (chosen[:, None] == chosen[None, :]) & (order[None, :] < order[:, None])
    position = tl.gather(starts, tl.maximum(chosen, 0), axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
    return tl.where(chosen >= 0, position, NOWHERE).to(tl.int64)


# A program places CHUNK choices after those of the programs before it, and stores the expert of each row, tile by tile.
# Reads and writes 8 bytes a choice, and 4 a row.
@triton.jit(do_not_specialize=["choices", "first", "expert_count"])
def _place_rows(
    experts, chunk_counts, positions, row_experts, choices, first, expert_count, rows, SINGLE: tl.constexpr,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr, PADDING: tl.constexpr,
    NOWHERE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    index, chosen = _chosen(experts, choices, first, expert_count, CHUNK)
    total, before = _totals(chosen, chunk_counts, SINGLE, EXPERTS)
    aligned = (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    stops = tl.cumsum(aligned, axis=0)
    starts = stops - aligned
    tl.store(positions + index, _positions(chosen, before + starts, NOWHERE, CHUNK), mask=index < choices)
    expert = tl.arange(0, EXPERTS)
    for tile in range(tl.program_id(0), rows // ALIGNMENT, tl.num_programs(0)):
        owner = tl.sum((stops <= tile * ALIGNMENT).to(tl.int32), axis=0)
        # An owner beyond the experts matches none, so the tile has no used row.
        used = tl.sum(tl.where(expert == owner, starts + total, 0), axis=0)
        row = tile * ALIGNMENT + tl.arange(0, ALIGNMENT)
        tl.store(row_experts + row, tl.where(row < used, owner, PADDING))


def contiguous_layout(
    experts: torch.Tensor, expert_count: int, alignment: int, rows: int, first: int = 0
) -> ContiguousLayout:
    positions = torch.empty_like(experts)
    row_experts = torch.empty(rows, dtype=torch.int32, device=experts.device)
    tile, chunk, chunks = _chunks(experts, expert_count)
    counts = _chunk_counts(experts, first, expert_count, tile, chunk, chunks)
    launch(_place_rows, (chunks,), experts.device,
        experts, counts, positions, row_experts, experts.numel(), first, expert_count, rows, chunks == 1, tile, chunk,
        alignment, PADDING, NOWHERE, num_warps=8,
    )  # fmt: skip
    return ContiguousLayout(positions=positions, row_experts=row_experts)


# A program places CHUNK choices after those of the programs before it, with no room between experts; the first one
# stores where each expert's rows end. Reads and writes 8 bytes a choice.
@triton.jit(do_not_specialize=["choices", "first", "expert_count"])
def _place_in_order(
    experts, chunk_counts, positions, ends, choices, first, expert_count, SINGLE: tl.constexpr, EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr, NOWHERE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    index, chosen = _chosen(experts, choices, first, expert_count, CHUNK)
    total, before = _totals(chosen, chunk_counts, SINGLE, EXPERTS)
    stops = tl.cumsum(total, axis=0)
    starts = before + stops - total
    tl.store(positions + index, _positions(chosen, starts, NOWHERE, CHUNK), mask=index < choices)
    expert = tl.arange(0, EXPERTS)
    tl.store(ends + expert, stops, mask=expert < tl.where(tl.program_id(0) == 0, expert_count, 0))


def expand(x: torch.Tensor, experts: torch.Tensor, expert_count: int, first: int = 0) -> RowsByExpert:
    """Rows that belong to no choice are not written."""
    positions = torch.empty_like(experts)
    ends = torch.empty(expert_count, dtype=torch.int32, device=experts.device)
    tile, chunk, chunks = _chunks(experts, expert_count)
    counts = _chunk_counts(experts, first, expert_count, tile, chunk, chunks)
    launch(_place_in_order, (chunks,), experts.device,
        experts, counts, positions, ends, experts.numel(), first, expert_count, chunks == 1, tile, chunk, NOWHERE,
        num_warps=8,
    )  # fmt: skip
    rows = x.new_empty(experts.numel(), x.shape[1])
    copy_rows(x, None, positions, rows, None)
    return RowsByExpert(rows, ends, positions)


def _chunks(experts: torch.Tensor, expert_count: int) -> tuple[int, int, int]:
    """The experts rounded up to a power of two, the choices of a program, and the number of programs."""
    tile, choices = next_power_of_2(expert_count), next_power_of_2(experts.numel())
    few = max(ALL_AT_ONCE // 2 // tile, FEWEST, choices // PROGRAMS)
    chunk = max(min(choices if choices * tile <= ALL_AT_ONCE else few, TABLE // tile, MOST_CHOICES), 16)
    return tile, chunk, max(cdiv(experts.numel(), chunk), 1)


def _chunk_counts(
    experts: torch.Tensor, first: int, expert_count: int, tile: int, chunk: int, chunks: int
) -> torch.Tensor | None:
    """[programs, experts]: how often each program's choices name each expert; None if one program sees all choices."""
    if chunks == 1:
        return None
    counts = torch.empty(chunks, tile, dtype=torch.int32, device=experts.device)
    launch(_count, (chunks,), experts.device,
        experts, counts, experts.numel(), first, expert_count, tile, chunk, num_warps=8,
    )  # fmt: skip
    return counts


# A program copies WIDTH values of a token, or all its scales, to its rows. Reads a token once.
@triton.jit(do_not_specialize=["scale_stride", "out_scale_stride"])
def _copy_rows(
    values, scales, positions, out_values, out_scales, scale_stride, out_scale_stride, CHOICES: tl.constexpr,
    VALUES: tl.constexpr, SCALES: tl.constexpr, WIDTH: tl.constexpr, SCALES_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    groups = tl.arange(0, SCALES_TILE)
    # The token's first program copies all scales.
    copies_scales = tl.program_id(1) * SCALES_TILE + groups < SCALES
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    found = tl.load(values + token * VALUES + columns, mask=columns < VALUES)
    if SCALES:
        factors = tl.load(scales + token + groups * scale_stride, mask=copies_scales)
    for choice in tl.static_range(CHOICES):
        position = tl.load(positions + token * CHOICES + choice)
        # A choice without a row is not copied.
        tl.store(out_values + position * VALUES + columns, found, mask=columns < tl.where(position >= 0, VALUES, 0))
        if SCALES:
            copied_scales = tl.program_id(1) * SCALES_TILE + groups < tl.where(position >= 0, SCALES, 0)
            tl.store(out_scales + position + groups * out_scale_stride, factors, mask=copied_scales)


def copy_rows(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    positions: torch.Tensor,
    out_values: torch.Tensor,
    out_scales: torch.Tensor | None,
) -> None:
    """Copy tokens to their rows. Tensors as in `place_copies`."""
    (tokens, choices), width = positions.shape, values.shape[-1]
    groups = 0 if scales is None else scales.shape[-1]
    if tokens:
        launch(_copy_rows, (tokens, cdiv(width, COPIED_WIDTH)), values.device,
            values, scales, positions, out_values, out_scales, scale_stride(scales), scale_stride(out_scales),
            choices, width, groups, COPIED_WIDTH, next_power_of_2(max(groups, 1)), num_warps=4,
        )  # fmt: skip


def expand_contiguous(
    x: Quantized, experts: torch.Tensor, expert_count: int, alignment: int, rows: int, first: int = 0
) -> ExpandedQuantized:
    layout = contiguous_layout(experts, expert_count, alignment, rows, first)
    out = empty_quantized(rows, x.values.shape[-1], device=experts.device)
    copy_rows(x.values, x.scales, layout.positions, out.values, out.scales)
    return ExpandedQuantized(out, layout)


def expand_masked(
    x: Quantized,
    experts: torch.Tensor,
    expert_count: int,
    capacity: int,
    shared: int = 0,
    first: int = 0,
    elsewhere: int = 0,
) -> ExpandedQuantized:
    layout = empty_masked(experts, expert_count, capacity, shared, elsewhere)
    out = empty_quantized(*layout.shape, x.values.shape[-1], device=experts.device)
    place_copies(x.values, x.scales, experts, layout, first, out.values, out.scales)
    return ExpandedQuantized(out, layout)


# A program sums WIDTH values of one token with its loads in flight at once. Reads k rows and a shared one, writes one.
@triton.jit(do_not_specialize=["shared_first", "shared_tokens"])
def _combine(
    rows, positions, weights, shared, out, width, shared_first, shared_tokens,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    total = tl.zeros([WIDTH], tl.float32)
    for choice in tl.static_range(CHOICES):
        position = tl.load(positions + token * CHOICES + choice)
        weight = tl.load(weights + token * CHOICES + choice)
        row = tl.load(rows + position * width + columns, mask=columns < tl.where(position >= 0, width, 0), other=0.0)
        total += row.to(tl.float32) * weight
    if SHARED:
        index = token - shared_first
        shared_width = tl.where((index >= 0) & (index < shared_tokens), width, 0)
        total += tl.load(shared + index * width + columns, mask=columns < shared_width, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total, mask=inside)


def combine(
    outputs: ExpertOutputs, part: torch.Tensor | None = None, first: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    rows, (tokens, choices) = outputs.rows, outputs.positions.shape
    width = rows.shape[-1]
    out = rows.new_empty(tokens, width) if out is None else out
    shared = outputs.shared if part is None else part
    if tokens:
        launch(_combine, (tokens, cdiv(width, SUMMED_WIDTH)), rows.device,
            rows, outputs.positions, outputs.weights, shared, out, width, first, 0 if shared is None else len(shared),
            choices, SUMMED_WIDTH, shared is not None, num_warps=4,
        )  # fmt: skip
    return out
