"""Group-limited choice of experts, from logits in shares."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.moe_gate.reference import NO_EXPERT, Routing
from kernels.tile_sizes import next_power_of_2

# Smaller than every number's key, and larger than every expert's index.
TAKEN, NONE = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


# One warp does one token: its experts are a tile [groups, experts of a group]. Reads 4 bytes for each expert and share,
# writes 12 a choice. The latency of one load and of 2k successive reductions over the warp limits it.
@triton.jit(do_not_specialize=["tokens"])
def _moe_gate(
    logits, bias, counted, weights, experts, tokens, group_size, scaling, SHARES: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr, CHOICES: tl.constexpr, NORMALIZE: tl.constexpr, SHARED: tl.constexpr,
    GROUPS_TILE: tl.constexpr, SIZE_TILE: tl.constexpr, PLACES_TILE: tl.constexpr, COUNTED: tl.constexpr,
    NO_EXPERT: tl.constexpr, SOFTMAX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    start_next(DEPENDENT)
    group = tl.arange(0, GROUPS_TILE)[:, None]
    member = tl.arange(0, SIZE_TILE)[None, :]
    expert = group * group_size + member
    there = (group < GROUPS) & (member < group_size)
    own_bias = tl.load(bias + expert, mask=there, other=0.0)
    wait_for_earlier(DEPENDENT)
    if COUNTED:
        counts = tl.load(counted + token)
    logits += token * GROUPS * group_size + expert
    total = tl.load(logits, mask=there, other=0.0)
    for share in tl.static_range(1, SHARES):
        total += tl.load(logits + share * tokens * (GROUPS * group_size), mask=there, other=0.0)
    if SOFTMAX:
        power = tl.where(there, tl.exp(total - tl.max(tl.where(there, total, float("-inf")))), 0.0)
        affinity = power / tl.sum(power)
    else:
        affinity = tl.sigmoid(total)
    choice = affinity + own_bias
    choice = tl.where(choice == choice, choice, float("-inf"))
    if GROUPS_PER_TOKEN < GROUPS:
        kept = _best_groups(
            tl.where(there, choice, float("-inf")), GROUPS, GROUPS_PER_TOKEN, GROUPS_TILE, SIZE_TILE, SOFTMAX
        )
        choice = tl.where(kept[:, None], choice, float("-inf"))
    # Keys are ordered as their numbers are; among equal experts the first one is taken.
    bits = choice.to(tl.int32, bitcast=True)
    keys = tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), TAKEN).reshape(GROUPS_TILE * SIZE_TILE)
    index = tl.arange(0, GROUPS_TILE * SIZE_TILE)
    place = tl.arange(0, PLACES_TILE)
    chosen = tl.zeros([PLACES_TILE], tl.int32)
    for number in tl.static_range(CHOICES):
        best = tl.min(tl.where(keys == tl.max(keys, axis=0), index, NONE), axis=0)
        keys = tl.where(index == best, TAKEN, keys)
        chosen = tl.where(place == number, best, chosen)
    real = place < CHOICES
    picked = tl.gather(affinity.reshape(GROUPS_TILE * SIZE_TILE), chosen, axis=0)
    picked = tl.where(real, picked, 0.0)
    if NORMALIZE:
        picked = picked / (tl.sum(picked, axis=0) + 1e-20)
    expert_of = chosen // SIZE_TILE * group_size + chosen % SIZE_TILE
    # Shared experts follow the chosen ones.
    expert_of = tl.where(real, expert_of, GROUPS * group_size + place - CHOICES)
    if COUNTED:
        expert_of = tl.where(counts, expert_of, NO_EXPERT)
    target, used = token * (CHOICES + SHARED) + place, place < CHOICES + SHARED
    tl.store(weights + target, tl.where(real, picked * scaling, 1.0), mask=used)
    tl.store(experts + target, expert_of.to(tl.int64), mask=used)


@triton.jit
def _best_groups(
    choice, GROUPS: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr, GROUPS_TILE: tl.constexpr, SIZE_TILE: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """[groups]: whether a group is among the best by the sum of its two largest choices, or by the largest one ALONE.
    First ones win ties.
    """
    member = tl.arange(0, SIZE_TILE)[None, :]
    first, where = tl.max(choice, axis=1, return_indices=True)
    second = tl.max(tl.where(member == where[:, None], float("-inf"), choice), axis=1)
    total = first + second if SIZE_TILE > 1 and not ALONE else first
    group = tl.arange(0, GROUPS_TILE)
    total = tl.where(group < GROUPS, total, float("-inf"))
    equal_before = (total[None, :] == total[:, None]) & (group[None, :] < group[:, None])
    before = (total[None, :] > total[:, None]) | equal_before
    return tl.sum(before.to(tl.int32), axis=1) < GROUPS_PER_TOKEN


def moe_gate(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing, counted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [shares, tokens, experts]."""
    shares, tokens, experts = logits.shape
    weights = torch.empty(tokens, routing.places, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, routing.places, dtype=torch.int64, device=logits.device)
    if tokens:
        groups, size = routing.groups, experts // routing.groups
        launch(_moe_gate, (tokens,), logits.device,
            logits, bias, counted, weights, chosen, tokens, size, routing.scaling, shares, groups,
            routing.groups_per_token, routing.experts_per_token, routing.normalize, routing.shared,
            next_power_of_2(groups), next_power_of_2(size), next_power_of_2(routing.places),
            counted is not None, NO_EXPERT, routing.softmax, num_warps=1,
        )  # fmt: skip
    return weights, chosen
