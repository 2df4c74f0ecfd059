"""Copies of tokens in a masked layout, in Triton: one kernel finds the rows and copies."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.moe_permute.layout import NOWHERE, MaskedLayout
from kernels.tile_sizes import cdiv, next_power_of_2

# How many choices a program reads at a time. There are few sizes, since each one is compiled.
CHUNKS = (128, 512, 1024)


@triton.jit
def count_choices(experts, copy, own, counted, first, stop, choices, CHUNK: tl.constexpr, COUNTED: tl.constexpr):
    """How many choices before `copy` name the expert `own`, and, for each expert of `counted` [COUNTED], how many of
    those before `stop` name it.
    """
    before = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK, COUNTED], tl.int32)
    for begin in range(0, stop, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        others = tl.load(experts + index, mask=index < choices, other=-1).to(tl.int32) - first
        before += ((others == own) & (index < copy)).to(tl.int32)
        count += (others[:, None] == counted[None, :]).to(tl.int32)
    return tl.sum(before, axis=0), tl.sum(count, axis=0)


# A program makes one token's copy for one expert. It finds the copy's row by itself, after the rows of the same
# expert's earlier choices, and counts the choices of COUNTED experts. For that it reads the choices, 8 bytes each, from
# the cache. Reads and writes a token, 1 and 1/32 bytes a value. The latency of the two loads and of adding up limits
# it.
@triton.jit(do_not_specialize=["choices", "first", "expert_count", "scale_stride", "out_scale_stride"])
def _place_copies(
    values, scales, experts, positions, counts, out_values, out_scales, choices, first, expert_count, capacity,
    scale_stride, out_scale_stride, CHOICES: tl.constexpr, VALUES: tl.constexpr, VALUES_TILE: tl.constexpr,
    SCALES: tl.constexpr, SCALES_TILE: tl.constexpr, COUNTED: tl.constexpr, CHUNK: tl.constexpr, NOWHERE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(0)
    token = (copy // CHOICES).to(tl.int64)
    columns, groups = tl.arange(0, VALUES_TILE), tl.arange(0, SCALES_TILE)
    counted = copy * COUNTED + tl.arange(0, COUNTED)
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    own = tl.load(experts + copy).to(tl.int32) - first
    held = (own >= 0) & (own < expert_count)
    copied, factored = columns < tl.where(held, VALUES, 0), groups < tl.where(held, SCALES, 0)
    # Most programs count no expert, and need only the choices before their copy, if this has a row.
    stop = tl.where(tl.min(counted, axis=0) < expert_count, choices, tl.where(held, copy, 0))
    found = tl.load(values + token * VALUES + columns, mask=copied)
    if SCALES:
        factors = tl.load(scales + token + groups * scale_stride, mask=factored)
    place, count = count_choices(experts, copy, own, counted, first, stop, choices, CHUNK, COUNTED)
    row = (own * capacity + place).to(tl.int64)
    tl.store(positions + copy, tl.where(held, row, NOWHERE))
    tl.store(out_values + row * VALUES + columns, found, mask=copied)
    if SCALES:
        target = own.to(tl.int64) * SCALES * out_scale_stride + place
        tl.store(out_scales + target + groups * out_scale_stride, factors, mask=factored)
    tl.store(counts + counted, count, mask=counted < expert_count)


def place_copies(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    experts: torch.Tensor,
    layout: MaskedLayout,
    first: int,
    out_values: torch.Tensor,
    out_scales: torch.Tensor | None,
) -> None:
    """Find the rows of all choices, and copy tokens there.

    values: [tokens, width] contiguous, of one byte each; scales: [tokens, groups], tokens next to each other, or None;
    outputs likewise, with the layout's leading dimensions.
    """
    expert_count, (tokens, choices), width = len(layout.counts), experts.shape, values.shape[-1]
    if not tokens:
        layout.counts.zero_()
        return
    copies, groups = tokens * choices, 0 if scales is None else scales.shape[-1]
    counted = next_power_of_2(cdiv(expert_count, copies))
    launch(_place_copies, (copies,), experts.device,
        values, scales, experts, layout.positions, layout.counts, out_values, out_scales, copies, first, expert_count,
        layout.capacity, scale_stride(scales), scale_stride(out_scales), choices, width,
        next_power_of_2(width), groups, next_power_of_2(max(groups, 1)), counted, chunk_size(copies), NOWHERE,
        num_warps=4,
    )  # fmt: skip


def empty_masked(
    experts: torch.Tensor, expert_count: int, capacity: int, shared: int = 0, elsewhere: int = 0
) -> MaskedLayout:
    """A layout that `place_copies` fills."""
    counts = torch.empty(expert_count, dtype=torch.int32, device=experts.device)
    return MaskedLayout(torch.empty_like(experts), counts, capacity, shared, elsewhere)


def chunk_size(choices: int) -> int:
    """How many choices a program reads at a time if it reads all."""
    return next((chunk for chunk in CHUNKS if chunk >= choices), CHUNKS[-1])


def scale_stride(scales: torch.Tensor | None) -> int:
    """The distance between the scales of neighbouring groups."""
    return 0 if scales is None else scales.stride(-1)
