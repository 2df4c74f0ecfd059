"""Sends tokens to copies of the experts that they chose, and counts how often each expert was chosen."""

import torch

from kernels.expert_route import reference


def route(choices: torch.Tensor, slots: torch.Tensor, copies: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Copies of an expert take turns, token by token. Returns the slots: [tokens, k] int64.

    choices: [tokens, k] int64, experts, or NO_EXPERT, which stays; slots: [experts, most copies] int64; copies:
    [experts] int64, how many of these count; chosen: [experts] int64, to which the choices of each are added in place.
    All contiguous. On a GPU: one kernel in Triton; the definition elsewhere.
    """
    assert choices.dtype == slots.dtype == copies.dtype == chosen.dtype == torch.int64
    assert slots.shape[:1] == copies.shape == chosen.shape
    assert all(each.is_contiguous() for each in (choices, slots, copies, chosen))
    if choices.is_cuda:
        from kernels.expert_route import triton

        return triton.route(choices, slots, copies, chosen)
    return reference.route(choices, slots, copies, chosen)
