"""Permutation of tokens by expert in Triton."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier
from kernels.moe_permute.experts import ExpertOutputs
from kernels.moe_permute.layout import PADDING, ContiguousLayout, ExpandedQuantized, MaskedLayout

# The most elements of a program's table [choices, experts].
TABLE = 1 << 15
# How many choices a program looks at at a time. There are few sizes, since each one is compiled.
CHUNKS = (128, 512, 1024)
# Values of a row that one program copies or sums: 16 bytes a thread.
COPIED_WIDTH, SUMMED_WIDTH = 2048, 1024


@triton.jit
def _table(experts, choices, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """This program's choices: their indices [CHUNK], and which expert each one chose, [CHUNK, EXPERTS]."""
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + index, mask=index < choices, other=EXPERTS).to(tl.int32)
    return index, chosen[:, None] == tl.arange(0, EXPERTS)[None, :]


# A program counts the experts of CHUNK choices. Reads 8 bytes a choice.
@triton.jit(do_not_specialize=["choices"])
def _count(experts, chunk_counts, choices, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    _, table = _table(experts, choices, EXPERTS, CHUNK)
    found = tl.sum(table.to(tl.int32), axis=0)
    tl.store(chunk_counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit
def _totals(table, chunk_counts, SINGLE: tl.constexpr, EXPERTS: tl.constexpr):
    """For each expert, the choices of all programs, and of the programs before this one."""
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    if SINGLE:
        total += tl.sum(table.to(tl.int32), axis=0)
    else:
        for chunk in range(tl.num_programs(0)):
            found = tl.load(chunk_counts + chunk * EXPERTS + tl.arange(0, EXPERTS))
            total += found
            before += tl.where(chunk < tl.program_id(0), found, 0)
    return total, before


# A program places CHUNK choices after those of the programs before it, and stores the expert of each row, tile by tile.
# Reads and writes 8 bytes a choice, and 4 a row.
@triton.jit(do_not_specialize=["choices"])
def _place_rows(
    experts, chunk_counts, positions, row_experts, choices, rows, SINGLE: tl.constexpr, EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr, PADDING: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    index, table = _table(experts, choices, EXPERTS, CHUNK)
    total, before = _totals(table, chunk_counts, SINGLE, EXPERTS)
    aligned = (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    stops = tl.cumsum(aligned, axis=0)
    starts = stops - aligned
    places = tl.cumsum(table.to(tl.int32), axis=0) - 1 + (before + starts)[None, :]
    position = tl.sum(tl.where(table, places, 0), axis=1)
    tl.store(positions + index, position.to(tl.int64), mask=index < choices)
    expert = tl.arange(0, EXPERTS)
    for tile in range(tl.program_id(0), rows // ALIGNMENT, tl.num_programs(0)):
        owner = tl.sum((stops <= tile * ALIGNMENT).to(tl.int32), axis=0)
        # An owner beyond the experts matches none, so the tile has no used row.
        used = tl.sum(tl.where(expert == owner, starts + total, 0), axis=0)
        row = tile * ALIGNMENT + tl.arange(0, ALIGNMENT)
        tl.store(row_experts + row, tl.where(row < used, owner, PADDING))


# A program copies WIDTH values of a token, or all its scales, to its k rows. Reads a token once.
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
    factors = tl.load(scales + token + groups * scale_stride, mask=copies_scales)
    for choice in tl.static_range(CHOICES):
        position = tl.load(positions + token * CHOICES + choice)
        tl.store(out_values + position * VALUES + columns, found, mask=columns < VALUES)
        tl.store(out_scales + position + groups * out_scale_stride, factors, mask=copies_scales)


@triton.jit
def count_choices(experts, copy, own, counted, choices, CHUNK: tl.constexpr, COUNTED: tl.constexpr):
    """How many choices before `copy` chose the expert `own`, and how many of all chose each of `counted` [COUNTED]."""
    before = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK, COUNTED], tl.int32)
    for first in range(0, choices, CHUNK):
        index = first + tl.arange(0, CHUNK)
        others = tl.load(experts + index, mask=index < choices, other=-1).to(tl.int32)
        before += ((others == own) & (index < copy)).to(tl.int32)
        count += (others[:, None] == counted[None, :]).to(tl.int32)
    return tl.sum(before, axis=0), tl.sum(count, axis=0)


# A program makes one token's copy for one expert. It finds the copy's row by itself, after the rows of the same
# expert's earlier choices, and counts the choices of COUNTED experts. For that each program reads all choices, 8 bytes
# each, from the cache. Reads and writes a token, 1 and 1/32 bytes a value. The latency of the two loads and of adding
# up limits it.
@triton.jit(do_not_specialize=["choices", "scale_stride"])
def _place_copies(
    values, scales, experts, positions, counts, out_values, out_scales, choices, expert_count, capacity, scale_stride,
    out_scale_stride, CHOICES: tl.constexpr, VALUES: tl.constexpr, VALUES_TILE: tl.constexpr, SCALES: tl.constexpr,
    SCALES_TILE: tl.constexpr, COUNTED: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(0)
    token = (copy // CHOICES).to(tl.int64)
    columns, groups = tl.arange(0, VALUES_TILE), tl.arange(0, SCALES_TILE)
    counted = copy * COUNTED + tl.arange(0, COUNTED)
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    own = tl.load(experts + copy).to(tl.int32)
    found = tl.load(values + token * VALUES + columns, mask=columns < VALUES)
    factors = tl.load(scales + token + groups * scale_stride, mask=groups < SCALES)
    place, count = count_choices(experts, copy, own, counted, choices, CHUNK, COUNTED)
    row = (own * capacity + place).to(tl.int64)
    tl.store(positions + copy, row)
    tl.store(out_values + row * VALUES + columns, found, mask=columns < VALUES)
    target = own.to(tl.int64) * SCALES * out_scale_stride + place
    tl.store(out_scales + target + groups * out_scale_stride, factors, mask=groups < SCALES)
    tl.store(counts + counted, count, mask=counted < expert_count)


# A program sums WIDTH values of one token with its loads in flight at once. Reads k rows and a shared one, writes one.
@triton.jit
def _combine(
    rows, positions, weights, shared, out, width,
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
        total += tl.load(rows + position * width + columns, mask=inside, other=0.0).to(tl.float32) * weight
    if SHARED:
        total += tl.load(shared + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total, mask=inside)


def chunk_size(choices: int) -> int:
    """Choices that a program looks at at a time if it reads all."""
    return next((chunk for chunk in CHUNKS if chunk >= choices), CHUNKS[-1])


def expand_masked(
    x: Quantized, experts: torch.Tensor, expert_count: int, capacity: int, shared: int = 0
) -> ExpandedQuantized:
    (tokens, choices), width, device = experts.shape, x.values.shape[1], experts.device
    layout = MaskedLayout(
        positions=torch.empty_like(experts),
        counts=torch.empty(expert_count, dtype=torch.int32, device=device),
        capacity=capacity,
        shared=shared,
    )
    out = empty_quantized(*layout.shape, width, device=device)
    if not tokens:
        layout.counts.zero_()
        return ExpandedQuantized(out, layout)
    copies, groups = tokens * choices, width // GROUP
    counted = triton.next_power_of_2(triton.cdiv(expert_count, copies))
    _place_copies[(copies,)](
        x.values, x.scales, experts, layout.positions, layout.counts, out.values, out.scales, copies, expert_count,
        capacity, x.scales.stride(1), out.scales.stride(-1), choices, width, triton.next_power_of_2(width), groups,
        triton.next_power_of_2(groups), counted, chunk_size(copies),
        num_warps=4, **dependent_launch(device),
    )  # fmt: skip
    return ExpandedQuantized(out, layout)


def expand_contiguous(
    x: Quantized, experts: torch.Tensor, expert_count: int, alignment: int, rows: int
) -> ExpandedQuantized:
    (tokens, choices), width, device = experts.shape, x.values.shape[1], experts.device
    layout = contiguous_layout(experts, expert_count, alignment, rows)
    out = empty_quantized(rows, width, device=device)
    if tokens:
        _copy_rows[(tokens, triton.cdiv(width, COPIED_WIDTH))](
            x.values, x.scales, layout.positions, out.values, out.scales, x.scales.stride(1), out.scales.stride(1),
            choices, width, width // GROUP, COPIED_WIDTH, triton.next_power_of_2(width // GROUP), num_warps=4,
            **dependent_launch(device),
        )  # fmt: skip
    return ExpandedQuantized(out, layout)


def contiguous_layout(experts: torch.Tensor, expert_count: int, alignment: int, rows: int) -> ContiguousLayout:
    positions = torch.empty_like(experts)
    row_experts = torch.empty(rows, dtype=torch.int32, device=experts.device)
    tile, chunk, chunks = _chunks(experts, expert_count)
    _place_rows[(chunks,)](
        experts, _chunk_counts(experts, tile, chunk, chunks), positions, row_experts, experts.numel(), rows,
        chunks == 1, tile, chunk, alignment, PADDING, num_warps=8, **dependent_launch(experts.device),
    )  # fmt: skip
    return ContiguousLayout(positions=positions, row_experts=row_experts)


def _chunks(experts: torch.Tensor, expert_count: int) -> tuple[int, int, int]:
    """The experts rounded up to a power of two, the choices of a program, and the number of programs."""
    tile = triton.next_power_of_2(expert_count)
    chunk = min(max(TABLE // tile, 16), max(triton.next_power_of_2(experts.numel()), 16))
    return tile, chunk, max(triton.cdiv(experts.numel(), chunk), 1)


def _chunk_counts(experts: torch.Tensor, tile: int, chunk: int, chunks: int) -> torch.Tensor | None:
    """[programs, experts]: how often each program's choices name each expert; None if one program sees all choices."""
    if chunks == 1:
        return None
    counts = torch.empty(chunks, tile, dtype=torch.int32, device=experts.device)
    _count[(chunks,)](experts, counts, experts.numel(), tile, chunk, num_warps=8, **dependent_launch(experts.device))
    return counts


def combine(outputs: ExpertOutputs) -> torch.Tensor:
    rows, (tokens, choices) = outputs.rows, outputs.positions.shape
    width = rows.shape[-1]
    out = rows.new_empty(tokens, width)
    if tokens:
        _combine[(tokens, triton.cdiv(width, SUMMED_WIDTH))](
            rows, outputs.positions, outputs.weights, outputs.shared, out, width, choices, SUMMED_WIDTH,
            outputs.shared is not None, num_warps=4, **dependent_launch(rows.device),
        )  # fmt: skip
    return out
