"""Group-limited choice of experts in Triton."""

import torch
import triton
import triton.language as tl

NOT_THERE = tl.constexpr(-(2**63))


# One warp a token: its experts as a tile [groups, experts of a group]. Reads 4 bytes an expert, writes 12 a choice;
# bound by the latency of k successive reductions over the warp.
@triton.jit
def _moe_gate(
    logits, bias, weights, experts, group_size, scaling, GROUPS: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr,
    CHOICES: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS_TILE: tl.constexpr, SIZE_TILE: tl.constexpr,
    CHOICES_TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    logits += token * GROUPS * group_size
    group = tl.arange(0, GROUPS_TILE)[:, None]
    member = tl.arange(0, SIZE_TILE)[None, :]
    expert = group * group_size + member
    there = (group < GROUPS) & (member < group_size)
    choice = tl.sigmoid(tl.load(logits + expert, mask=there, other=0.0)) + tl.load(bias + expert, mask=there, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))
    if GROUPS_PER_TOKEN < GROUPS:
        kept = _best_groups(tl.where(there, choice, float("-inf")), GROUPS, GROUPS_PER_TOKEN, GROUPS_TILE, SIZE_TILE)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    # A key orders as its number does, with the expert below it: one reduction finds both, and no two keys are equal.
    bits = choice.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    keys = tl.where(there, keys, NOT_THERE).reshape(GROUPS_TILE * SIZE_TILE)
    place = tl.arange(0, CHOICES_TILE)
    chosen = tl.zeros([CHOICES_TILE], tl.int32)
    for index in tl.static_range(CHOICES):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, NOT_THERE, keys)
        chosen = tl.where(place == index, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
    real = place < CHOICES
    affinity = tl.where(real, tl.sigmoid(tl.load(logits + chosen, mask=real, other=0.0)), 0.0)
    if NORMALIZE:
        affinity = affinity / (tl.sum(affinity, axis=0) + 1e-20)
    tl.store(weights + token * CHOICES + place, affinity * scaling, mask=real)
    tl.store(experts + token * CHOICES + place, chosen.to(tl.int64), mask=real)


@triton.jit
def _best_groups(
    choice, GROUPS: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr, GROUPS_TILE: tl.constexpr, SIZE_TILE: tl.constexpr
):
    """[groups] whether a group is among the best by the sum of its two largest choices; of equals, the first."""
    member = tl.arange(0, SIZE_TILE)[None, :]
    first, where = tl.max(choice, axis=1, return_indices=True)
    second = tl.max(tl.where(member == where[:, None], float("-inf"), choice), axis=1)
    total = first + second if SIZE_TILE > 1 else first
    group = tl.arange(0, GROUPS_TILE)
    total = tl.where(group < GROUPS, total, float("-inf"))
    equal_before = (total[None, :] == total[:, None]) & (group[None, :] < group[:, None])
    before = (total[None, :] > total[:, None]) | equal_before
    return tl.sum(before.to(tl.int32), axis=1) < GROUPS_PER_TOKEN


def moe_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    experts_per_token: int,
    groups: int,
    groups_per_token: int,
    normalize: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty(tokens, experts_per_token, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, experts_per_token, dtype=torch.int64, device=logits.device)
    if tokens:
        size = experts // groups
        _moe_gate[(tokens,)](
            logits, bias, weights, chosen, size, scaling, groups, groups_per_token, experts_per_token, normalize,
            triton.next_power_of_2(groups), triton.next_power_of_2(size), triton.next_power_of_2(experts_per_token),
            num_warps=1,
        )  # fmt: skip
    return weights, chosen
