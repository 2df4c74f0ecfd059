"""Attention over prompts by cuDNN, one prompt at a time. A CUDA build of torch brings it."""

import torch

from kernels.mla_prefill.plan import PrefillPlan

# cuDNN plans each new length for 30 ms and keeps the plan. That pays for long prompts of few different lengths.
SHORTEST = 4096
MULTIPLE = 256


def takes(query: torch.Tensor, value: torch.Tensor, plan: PrefillPlan) -> bool:
    """Whether it is the fastest: for long prompts of DeepSeek's widths without a cached prefix."""
    return (
        query.dtype == torch.bfloat16
        and (query.shape[2], value.shape[2]) == (192, 128)
        and plan.causal
        and plan.query_lengths == plan.key_lengths
        and all(length >= SHORTEST and length % MULTIPLE == 0 for length in plan.query_lengths)
        and torch.backends.cudnn.is_available()
    )


def mla_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PrefillPlan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as `kernels.mla_prefill.mla_prefill`; a causal prompt has no cached prefix."""
    if len(plan.query_lengths) == 1:
        return _attend(query, key, value, plan.causal, scale)
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
    log_sum = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32, device=query.device)
    for queries, keys in plan.ranges():
        out[queries], log_sum[:, queries] = _attend(query[queries], key[keys], value[keys], plan.causal, scale)
    return out, log_sum


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *parts, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), log_sum.view(query.shape[1], query.shape[0])
