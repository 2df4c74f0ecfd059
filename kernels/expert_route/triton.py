"""Routes and counts in one kernel: as torch's operations they would be six launches a layer."""

import torch
import triton
import triton.language as tl

PAIRS = 256


# A program routes PAIRS choices.
@triton.jit
def _route(choices, counted, slots, copies, chosen, out, pairs, k, most_copies, PAIRS: tl.constexpr):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    there = pair < pairs
    token = pair // k
    expert = tl.load(choices + pair, mask=there, other=0)
    turn = token % tl.load(copies + expert)
    tl.store(out + pair, tl.load(slots + expert * most_copies + turn), mask=there)
    tl.atomic_add(chosen + expert, tl.load(counted + token, mask=there, other=0), mask=there)


def route(
    choices: torch.Tensor, counted: torch.Tensor, slots: torch.Tensor, copies: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Same as `kernels.expert_route.route`."""
    out = torch.empty_like(choices)
    pairs = choices.numel()
    if pairs:
        _route[(triton.cdiv(pairs, PAIRS),)](
            choices, counted, slots, copies, chosen, out, pairs, choices.shape[1], slots.shape[1], PAIRS
        )
    return out
