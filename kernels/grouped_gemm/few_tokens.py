"""Experts' feed-forward layers of a few tokens in bfloat16 on Hopper, in Triton. Two kernels, which find their experts
in the tokens' choices, in place of four: rows are neither placed nor copied.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.few_rows import are_few
from kernels.hopper import is_hopper
from kernels.moe_permute.layout import NOWHERE
from kernels.tile_sizes import cdiv, next_power_of_2

# Weights of a program, which hold 64 registers of a thread, and its warps: five programs a multiprocessor have three
# times as many bytes under way as its memory needs.
TILE, WARPS = 1 << 14, 4


# A program multiplies some outputs of one expert by all tokens that chose it, from registers. It belongs to a token's
# choice, and has nothing to do if an earlier token made the same one. GATED: the first product, whose outputs are those
# of SwiGLU. Reads 2 bytes a weight of each expert that is chosen.
#
# Shared experts are chosen last, known without the choices, and started first: their first weights are read while the
# gate still chooses. The first product waits before it lets the last one start, which therefore finds the choices made,
# and reads its weights while the last tiles of the first product are computed.
@triton.jit(do_not_specialize=["count", "first"])
def _chosen_experts(
    x, weights, choices, positions, out, outputs, inputs, count, first, TOKENS: tl.constexpr, PLACES: tl.constexpr,
    SHARED: tl.constexpr, PAIRS_TILE: tl.constexpr, GATED: tl.constexpr,
    OUTPUTS_TILE: tl.constexpr, INPUTS_TILE: tl.constexpr, NOWHERE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    place, token = PLACES - 1 - tl.program_id(1), tl.program_id(2)
    pair, routed = token * PLACES + place, place < PLACES - SHARED
    if GATED:
        # Otherwise nothing is read that the kernel before wrote.
        if routed or token > 0:
            wait_for_earlier(DEPENDENT)
    else:
        start_next(DEPENDENT)
    index = tl.arange(0, PAIRS_TILE)
    leads = token == 0
    if routed:
        # Past the first cache, which may have an earlier layer's choices.
        expert = tl.load(choices + pair, cache_modifier=".cg").to(tl.int32) - first
        earlier = tl.load(choices + index, mask=index < token * PLACES, other=-1, cache_modifier=".cg").to(tl.int32)
        same = (earlier - first == expert) & (index < token * PLACES)
        leads = tl.sum(same.to(tl.int32), axis=0) == 0
    else:
        expert = count - PLACES + place
    computes = leads & (expert >= 0) & (expert < count)
    output, column = tl.program_id(0) * OUTPUTS_TILE + tl.arange(0, OUTPUTS_TILE), tl.arange(0, INPUTS_TILE)
    inside = column < inputs
    there = output < tl.where(computes, outputs, 0)
    matrix = weights + expert.to(tl.int64) * outputs * (2 if GATED else 1) * inputs
    own = matrix + output[:, None].to(tl.int64) * inputs + column[None, :]
    held = tl.load(own, mask=there[:, None] & inside[None, :], other=0.0)
    if GATED:
        up = tl.load(own + outputs * inputs, mask=there[:, None] & inside[None, :], other=0.0)
    wait_for_earlier(DEPENDENT)
    chosen = tl.load(choices + index, mask=index < TOKENS * PLACES, other=-1, cache_modifier=".cg").to(tl.int32) - first
    if GATED:
        start_next(DEPENDENT)
        if tl.program_id(0) == 0:
            here = tl.sum(tl.where(index == pair, ((chosen >= 0) & (chosen < count)).to(tl.int32), 0), axis=0)
            tl.store(positions + pair, tl.where(here > 0, pair, NOWHERE).to(tl.int64))
    if computes:
        for other in tl.static_range(TOKENS):
            mine = (index >= other * PLACES) & (index < (other + 1) * PLACES) & (chosen == expert)
            # The token's choice of this expert; at most one.
            choice = tl.sum(tl.where(mine, index + 1, 0), axis=0) - 1
            if choice >= 0:
                row = other if GATED else choice
                values = tl.load(x + row * inputs + column, mask=inside, other=0.0).to(tl.float32)[None, :]
                total = tl.sum(held.to(tl.float32) * values, axis=1)
                if GATED:
                    total = total * tl.sigmoid(total) * tl.sum(up.to(tl.float32) * values, axis=1)
                tl.store(out + choice * outputs + output, total.to(out.dtype.element_ty), mask=there)


def takes(x: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Whether there are few tokens, and a program holds whole rows of both weights."""
    _, matrix, hidden = gate_up.shape
    held = max(hidden, matrix // 2) <= TILE // 2
    return is_hopper() and are_few(x) and x.dtype == gate_up.dtype == torch.bfloat16 and held and x.is_contiguous()


def feed_forward(
    x: torch.Tensor, choices: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, first: int, shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.grouped_gemm.chosen_feed_forward`, for what it `takes`."""
    rows = choices.numel()
    inner, out = x.new_empty(rows, down.shape[2]), x.new_empty(rows, x.shape[1])
    positions = torch.empty_like(choices)
    _launch(x, gate_up, choices, positions, inner, first, shared, gated=True)
    _launch(inner, down, choices, positions, out, first, shared, gated=False)
    return out, positions


def _launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    first: int,
    shared: int,
    *,
    gated: bool,
) -> None:
    (tokens, places), inputs, outputs = choices.shape, x.shape[1], out.shape[1]
    padded = next_power_of_2(inputs)
    tile = TILE // padded // (2 if gated else 1)
    launch(_chosen_experts, (cdiv(outputs, tile), places, tokens), x.device,
        x, weights, choices, positions, out, outputs, inputs, len(weights), first, tokens, places, shared,
        next_power_of_2(tokens * places), gated, tile, padded, NOWHERE, num_warps=WARPS,
    )  # fmt: skip
