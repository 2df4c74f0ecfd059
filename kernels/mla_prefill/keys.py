"""Expanded keys: each head's own part, and the rotated part that all heads share."""

import torch


def join_keys(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """own: [keys, heads, nope], last dimension contiguous; shared: [keys, rope], likewise, of the same dtype.

    Returns a new [keys, heads, nope + rope]. No keys give none.
    """
    assert own.shape[0] == shared.shape[0] and own.dtype == shared.dtype
    assert own.stride(2) == shared.stride(1) == 1
    if own.is_cuda:
        from kernels.mla_prefill import triton_keys

        return triton_keys.join_keys(own, shared)
    return torch.cat([own, shared.unsqueeze(1).expand(-1, own.shape[1], -1)], dim=2)
