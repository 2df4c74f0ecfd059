"""Routes and counts in one kernel: torch's operations for this would be six launches a layer."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.moe_gate import NO_EXPERT
from kernels.tile_sizes import cdiv

PAIRS = 256


# A program routes PAIRS choices.
@triton.jit
def _route(
    choices, slots, copies, chosen, out, pairs, k, most_copies, NO_EXPERT: tl.constexpr, PAIRS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    there = pair < pairs
    token = pair // k
    expert = tl.load(choices + pair, mask=there, other=NO_EXPERT)
    made = expert != NO_EXPERT
    turn = token % tl.load(copies + expert, mask=made, other=1)
    slot = tl.load(slots + expert * most_copies + turn, mask=made, other=NO_EXPERT)
    tl.store(out + pair, slot, mask=there)
    tl.atomic_add(chosen + expert, 1, mask=made)


def route(choices: torch.Tensor, slots: torch.Tensor, copies: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Same as `kernels.expert_route.route`."""
    out = torch.empty_like(choices)
    pairs = choices.numel()
    if pairs:
        launch(_route, (cdiv(pairs, PAIRS),), choices.device,
            choices, slots, copies, chosen, out, pairs, choices.shape[1], slots.shape[1], NO_EXPERT, PAIRS,
        )  # fmt: skip
    return out
