"""Attention over prompts by cuDNN, which comes with a CUDA build of torch, one prompt at a time."""

import torch

from kernels.mla_prefill.plan import PrefillPlan


def mla_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PrefillPlan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.mla_prefill.mla_prefill`; a causal prompt has no cached prefix."""
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
    log_sum = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32, device=query.device)
    for queries, keys in plan.ranges():
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query[queries], key[keys], value[keys]))
        found, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *parts, None, True, 0.0, plan.causal, False, scale=scale
        )
        out[queries] = found[0].transpose(0, 1)
        log_sum[:, queries] = sums.view(query.shape[1], -1)
    return out, log_sum
