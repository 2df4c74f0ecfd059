"""To which copies of the experts that they chose tokens go, and how often each expert was chosen."""

import torch

from kernels.expert_route import reference


def route(
    choices: torch.Tensor, counted: torch.Tensor, slots: torch.Tensor, copies: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Copies of an expert take turns, token by token. Returns the slots: [tokens, k] int64.

    choices: [tokens, k] int64, experts; counted: [tokens] int64, by how much a token's choices are added to `chosen`,
    [experts] int64, in place; slots: [experts, most copies] int64; copies: [experts] int64, how many of these count.
    All contiguous. On a GPU: one kernel in Triton; the definition elsewhere.
    """
    assert choices.dtype == counted.dtype == slots.dtype == copies.dtype == chosen.dtype == torch.int64
    assert counted.shape == choices.shape[:1] and slots.shape[:1] == copies.shape == chosen.shape
    assert all(each.is_contiguous() for each in (choices, counted, slots, copies, chosen))
    if choices.is_cuda:
        from kernels.expert_route import triton

        return triton.route(choices, counted, slots, copies, chosen)
    return reference.route(choices, counted, slots, copies, chosen)
