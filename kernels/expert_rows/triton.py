"""Rows for INT4 experts in Triton."""

from math import prod

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.expert_rows import reference
from kernels.moe_permute import contiguous_layout, masked_capacity
from kernels.moe_permute.layout import NOWHERE, ContiguousLayout, Layout, MaskedLayout
from kernels.moe_permute.triton import copy_rows
from kernels.moe_permute.triton_masked import chunk_size, empty_masked, place_copies
from kernels.tile_sizes import cdiv, next_power_of_2
from kernels.w4a8_gemm import ScaledRows
from kernels.w4a8_gemm.operands import TURN

LARGEST = tl.constexpr(reference.LARGEST)
SMALLEST = tl.constexpr(reference.SMALLEST)
# How many choices a program reads at a time: more would not fit its registers.
MOST_CHUNK = 512
# Up to this many copies rows are cut into smaller parts, so that there are as many programs as the card has room for.
FEW_COPIES = 1024


@triton.jit
def _scale_of(row, static_scale, STATIC: tl.constexpr):
    """The expert's scale, or the one that makes the row's largest magnitude e4m3's largest."""
    if STATIC:
        return static_scale
    return tl.div_rn(tl.maximum(tl.max(tl.abs(row), axis=0), SMALLEST), LARGEST)


@triton.jit
def _quantize(row, scale):
    quantized = row * tl.div_rn(1.0, scale)
    return tl.minimum(tl.maximum(quantized, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def _load_parameters(pre_scale, input_scale, columns, inside, PRE_SCALED: tl.constexpr, STATIC: tl.constexpr):
    """A layer's scales: [columns] by channel, or 1, and the static one."""
    by_channel = tl.load(pre_scale + columns, mask=inside, other=0.0) if PRE_SCALED else 1.0
    return by_channel, tl.load(input_scale) if STATIC else 0.0


@triton.jit
def _store_row(position, values, scales, columns, quantized, scale, WIDTH: tl.constexpr, STATIC: tl.constexpr):
    """Store some columns of a row, and its scale; nothing for a copy without a row."""
    tl.store(values + position * WIDTH + columns, quantized, mask=columns < tl.where(position >= 0, WIDTH, 0))
    if not STATIC:
        tl.store(scales + position, scale, mask=position >= 0)


@triton.jit
def _find_places(
    experts, own, counted, copy, first, expert_count, choices,
    CHUNK: tl.constexpr, CHOSEN: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """For each expert of `own` [CHOSEN], how many choices before the copy name it; for each of `counted` [COUNTED], how
    many of all do.
    """
    before = tl.zeros([CHUNK, CHOSEN], tl.int32)
    count = tl.zeros([CHUNK, COUNTED], tl.int32)
    # Most programs count no expert, and need to read only the choices before their copy.
    stop = tl.where(tl.min(counted, axis=0) < expert_count, choices, copy)
    for start in range(0, stop, CHUNK):
        index = start + tl.arange(0, CHUNK)
        others = tl.load(experts + index, mask=index < choices, other=-1).to(tl.int32) - first
        before += ((others[:, None] == own[None, :]) & (index < copy)[:, None]).to(tl.int32)
        count += (others[:, None] == counted[None, :]).to(tl.int32)
    return tl.sum(before, axis=0), tl.sum(count, axis=0)


# A program quantizes PART values of a token and copies them to the token's k rows. It finds these by itself: they
# follow those of the same experts' earlier choices, which it reads, 8 bytes each, from the cache. Reads 2 bytes a value
# and 4 of its channel, writes as many as there are rows.
@triton.jit(do_not_specialize=["choices", "first"])
def _place_masked(
    x, pre_scale, input_scale, experts, positions, counts, values, scales, choices, first, expert_count, capacity,
    CHOICES: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, COUNTED: tl.constexpr,
    CHUNK: tl.constexpr, PRE_SCALED: tl.constexpr, STATIC: tl.constexpr, NOWHERE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    token, part = tl.program_id(0), tl.program_id(1)
    columns, choice = part * PART + tl.arange(0, PART), tl.arange(0, CHOSEN)
    inside, chosen = columns < WIDTH, choice < CHOICES
    by_channel, static_scale = _load_parameters(pre_scale, input_scale, columns, inside, PRE_SCALED, STATIC)
    counted = (token * tl.num_programs(1) + part) * COUNTED + tl.arange(0, COUNTED)
    copy = token * CHOICES
    wait_for_earlier(DEPENDENT)
    own = tl.load(experts + copy + choice, mask=chosen, other=-1).to(tl.int32) - first
    row = tl.load(x + token.to(tl.int64) * WIDTH + columns, mask=inside, other=0.0).to(tl.float32) * by_channel
    places, count = _find_places(experts, own, counted, copy, first, expert_count, choices, CHUNK, CHOSEN, COUNTED)
    found = tl.where((own >= 0) & (own < expert_count), own * capacity + places, NOWHERE)
    # The token's first program stores them.
    tl.store(positions + copy + choice, found.to(tl.int64), mask=part * CHOSEN + choice < CHOICES)
    tl.store(counts + counted, count, mask=counted < expert_count)
    scale = _scale_of(row, static_scale, STATIC)
    quantized = _quantize(row, scale)
    for each in tl.static_range(CHOICES):
        position = tl.sum(tl.where(choice == each, found, 0), axis=0).to(tl.int64)
        _store_row(position, values, scales, columns, quantized, scale, WIDTH, STATIC)


# A program quantizes PART values of a token and copies them to its k rows. Reads 2 bytes a value once and 4 from the
# cache, writes k.
@triton.jit
def _place_in(
    x, pre_scale, input_scale, positions, values, scales, CHOICES: tl.constexpr, WIDTH: tl.constexpr,
    PART: tl.constexpr, PRE_SCALED: tl.constexpr, STATIC: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART + tl.arange(0, PART)
    inside = columns < WIDTH
    by_channel, static_scale = _load_parameters(pre_scale, input_scale, columns, inside, PRE_SCALED, STATIC)
    wait_for_earlier(DEPENDENT)
    row = tl.load(x + token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32) * by_channel
    scale = _scale_of(row, static_scale, STATIC)
    quantized = _quantize(row, scale)
    for choice in tl.static_range(CHOICES):
        position = tl.load(positions + token * CHOICES + choice)
        _store_row(position, values, scales, columns, quantized, scale, WIDTH, STATIC)


# A program quantizes PART values of a token. Reads 2 bytes a value and 4 of its channel, writes 1.
@triton.jit
def _quantize_rows(
    x, pre_scale, input_scale, values, scales, WIDTH: tl.constexpr, PART: tl.constexpr,
    PRE_SCALED: tl.constexpr, STATIC: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART + tl.arange(0, PART)
    inside = columns < WIDTH
    by_channel, static_scale = _load_parameters(pre_scale, input_scale, columns, inside, PRE_SCALED, STATIC)
    wait_for_earlier(DEPENDENT)
    row = tl.load(x + token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32) * by_channel
    scale = _scale_of(row, static_scale, STATIC)
    tl.store(values + token * WIDTH + columns, _quantize(row, scale), mask=inside)
    if not STATIC:
        tl.store(scales + token, scale)


# A program gates and quantizes a row, whose gate and up take turns of TURN values. Reads 4 bytes a value, and 4 of its
# expert's channel from the cache; writes 1.
@triton.jit(do_not_specialize=["capacity"])
def _swiglu(
    gate_up, positions, row_experts, pre_scale, values, scales, capacity, MASKED: tl.constexpr, WIDTH: tl.constexpr,
    PART: tl.constexpr, TURN: tl.constexpr, PRE_SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    columns = tl.arange(0, PART)
    inside, gates = columns < WIDTH, columns // TURN * (2 * TURN) + columns % TURN
    wait_for_earlier(DEPENDENT)
    row = tl.load(positions + tl.program_id(0))
    if row < 0:
        return
    gate = tl.load(gate_up + row * 2 * WIDTH + gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + gates + TURN, mask=inside, other=0.0).to(tl.float32)
    expert = row // capacity if MASKED else tl.load(row_experts + row).to(tl.int64)
    by_channel = tl.load(pre_scale + expert * WIDTH + columns, mask=inside, other=0.0) if PRE_SCALED else 1.0
    inner = gate * tl.sigmoid(gate) * up * by_channel
    scale = _scale_of(inner, 0.0, STATIC=False)
    tl.store(values + row * WIDTH + columns, _quantize(inner, scale), mask=inside)
    tl.store(scales + row, scale)


def place_rows(
    x: torch.Tensor,
    choices: torch.Tensor,
    expert_count: int,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    first: int,
    elsewhere: int,
) -> tuple[ScaledRows, Layout]:
    capacity = masked_capacity(choices, expert_count, elsewhere)
    if capacity is None:
        layout = contiguous_layout(choices, expert_count, first)
        return place_in(layout, x, pre_scale, input_scale), layout
    masked = empty_masked(choices, expert_count, capacity, 0, elsewhere)
    return _place_in_masked(masked, x, choices, pre_scale, input_scale, first), masked


def _place_in_masked(
    layout: MaskedLayout,
    x: torch.Tensor,
    choices: torch.Tensor,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    first: int,
) -> ScaledRows:
    """`place_rows` in a masked layout, which it fills too."""
    width, copies, expert_count = x.shape[1], choices.numel(), len(layout.counts)
    rows = _empty_rows(layout.shape, width, input_scale, x.device)
    if not copies:
        layout.counts.zero_()
        return rows
    part = _part(width, rows.static, copies)
    grid = (len(choices), cdiv(width, part))
    launch(_place_masked, grid, x.device,
        x, pre_scale, input_scale, choices, layout.positions, layout.counts, rows.values, rows.scales, copies, first,
        expert_count, layout.capacity, choices.shape[1], next_power_of_2(choices.shape[1]), width, part,
        next_power_of_2(cdiv(expert_count, prod(grid))), min(chunk_size(copies), MOST_CHUNK),
        pre_scale is not None, rows.static, NOWHERE, num_warps=_warps(part),
    )  # fmt: skip
    return rows


def place_in(
    layout: Layout, x: torch.Tensor, pre_scale: torch.Tensor | None, input_scale: torch.Tensor | None
) -> ScaledRows:
    """`place_rows` in a layout that exists."""
    (tokens, width), choices = x.shape, layout.positions.shape[1]
    rows = _empty_rows(layout.shape, width, input_scale, x.device)
    part = _part(width, rows.static, layout.positions.numel())
    if tokens:
        launch(_place_in, (tokens, cdiv(width, part)), x.device,
            x, pre_scale, input_scale, layout.positions, rows.values, rows.scales, choices, width, part,
            pre_scale is not None, rows.static, num_warps=_warps(part),
        )  # fmt: skip
    return rows


def quantize_rows(x: torch.Tensor, pre_scale: torch.Tensor | None, input_scale: torch.Tensor | None) -> ScaledRows:
    tokens, width = x.shape
    rows = _empty_rows((tokens,), width, input_scale, x.device)
    part = _part(width, rows.static, tokens)
    if tokens:
        launch(_quantize_rows, (tokens, cdiv(width, part)), x.device,
            x, pre_scale, input_scale, rows.values, rows.scales, width, part, pre_scale is not None, rows.static,
            num_warps=_warps(part),
        )  # fmt: skip
    return rows


def place_quantized(
    x: ScaledRows, choices: torch.Tensor, expert_count: int, first: int, elsewhere: int
) -> tuple[ScaledRows, Layout]:
    capacity = masked_capacity(choices, expert_count, elsewhere)
    layout: Layout
    if capacity is None:
        layout = contiguous_layout(choices, expert_count, first)
    else:
        layout = empty_masked(choices, expert_count, capacity, 0, elsewhere)
    rows = _empty_rows(layout.shape, x.values.shape[1], x.scales if x.static else None, choices.device)
    scales, placed = (None, None) if x.static else (_as_groups(x.scales), _as_groups(rows.scales))
    if isinstance(layout, ContiguousLayout):
        copy_rows(x.values, scales, layout.positions, rows.values, placed)
    else:
        place_copies(x.values, scales, choices, layout, first, rows.values, placed)
    return rows, layout


def swiglu_rows(gate_up: torch.Tensor, layout: Layout, pre_scale: torch.Tensor | None) -> ScaledRows:
    width, masked = gate_up.shape[-1] // 2, isinstance(layout, MaskedLayout)
    rows = _empty_rows(layout.shape, width, None, gate_up.device)
    copies = layout.positions.numel()
    part = _part(width, rows.static, copies)
    if copies:
        launch(_swiglu, (copies,), gate_up.device,
            gate_up, layout.positions, layout.row_experts if isinstance(layout, ContiguousLayout) else None, pre_scale,
            rows.values, rows.scales, layout.shape[-1], masked, width, part, TURN, pre_scale is not None,
            num_warps=_warps(part),
        )  # fmt: skip
    return rows


def _empty_rows(
    shape: tuple[int, ...], width: int, input_scale: torch.Tensor | None, device: torch.device
) -> ScaledRows:
    """Uninitialised but for static scales."""
    values = torch.empty(*shape, width, dtype=torch.float8_e4m3fn, device=device)
    if input_scale is not None:
        return ScaledRows(values, input_scale, static=True)
    return ScaledRows(values, torch.empty(shape, dtype=torch.float32, device=device), static=False)


def _as_groups(scales: torch.Tensor) -> torch.Tensor:
    """[..., rows] as the scales of one group a row, [..., rows, 1] with rows next to each other."""
    return scales.unsqueeze(-2).transpose(-1, -2)


def _part(width: int, static: bool, copies: int) -> int:
    """Values of a row that one program quantizes: all, if their largest decides the scale."""
    whole: int = next_power_of_2(width)
    return min(whole, 1024 if copies <= FEW_COPIES else 2048) if static else whole


def _warps(width: int) -> int:
    return 8 if width > 4096 else 4
