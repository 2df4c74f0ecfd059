"""Prompt attention of other packages: cuDNN's, which comes with a CUDA build of torch, and FlashAttention-3.

`DEEPMESH_FLASH_ATTENTION` names a build of FlashAttention-3's operators (`_vllm_fa3_C...so`, as vLLM's wheel carries
it), which needs no package.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from kernels.mla_prefill import PrefillPlan

BUILD_VARIABLE = "DEEPMESH_FLASH_ATTENTION"
PACKAGE = "flash_attn_interface"


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PrefillPlan, float], torch.Tensor]


def cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PrefillPlan, scale: float) -> torch.Tensor:
    """Like `mla_prefill` with whole keys, [keys, heads, 192], for prompts one after another, all uncached. Returns
    outputs.
    """
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
    for queries, keys in plan.ranges():
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query[queries], key[keys], value[keys]))
        found: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *parts, None, True, 0.0, True, False, scale=scale
        )[0]
        if len(plan.query_lengths) == 1:
            return found[0].transpose(0, 1)
        out[queries] = found[0].transpose(0, 1)
    return out


def has_flash_attention() -> bool:
    """Whether FlashAttention-3 is there as a package or as a build."""
    return BUILD_VARIABLE in os.environ or find_spec(PACKAGE) is not None


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PrefillPlan, scale: float
) -> torch.Tensor:
    if BUILD_VARIABLE in os.environ:
        return _attend_by_build(query, key, value, plan, scale)
    out: torch.Tensor = import_module(PACKAGE).flash_attn_varlen_func(
        query, key, value, plan.query_starts, plan.key_starts, max(plan.query_lengths), max(plan.key_lengths),
        softmax_scale=scale, causal=True, return_attn_probs=True,
    )[0]  # fmt: skip
    return out


def _attend_by_build(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PrefillPlan, scale: float
) -> torch.Tensor:
    _load_build()
    # In the order of the operator's schema. The None arguments are for caches, rotation, FP8, sinks and schedules.
    out: torch.Tensor = torch.ops._vllm_fa3_C.fwd(
        query, key, value, None, None, None, None, plan.query_starts, plan.key_starts, None, None, None,
        max(plan.query_lengths), max(plan.key_lengths), None, None, None, None, None, None, None, None, None,
        scale, True, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip
    return out


@cache
def _load_build() -> None:
    torch.ops.load_library(os.environ[BUILD_VARIABLE])
