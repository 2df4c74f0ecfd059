"""Attention over ragged prompts by FlashAttention-3, on Hopper: by its package, or by a build of its operators.

`DEEPMESH_FLASH_ATTENTION` names such a build (`_vllm_fa3_C...so`, as vLLM's wheel carries it), which needs no package.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from kernels.hopper import is_hopper
from kernels.mla_prefill.plan import PrefillPlan

BUILD_VARIABLE = "DEEPMESH_FLASH_ATTENTION"
PACKAGE = "flash_attn_interface"


@cache
def available() -> bool:
    """Whether there is a Hopper GPU, and the package or a build."""
    return is_hopper() and (BUILD_VARIABLE in os.environ or find_spec(PACKAGE) is not None)


def mla_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PrefillPlan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if BUILD_VARIABLE in os.environ:
        return _attend_by_build(query, key, value, plan, scale)
    out, log_sum = import_module(PACKAGE).flash_attn_varlen_func(
        query, key, value, plan.query_starts, plan.key_starts, max(plan.query_lengths), max(plan.key_lengths),
        softmax_scale=scale, causal=plan.causal, return_attn_probs=True,
    )  # fmt: skip
    return out, log_sum


def _attend_by_build(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PrefillPlan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _load_build()
    # In the order of the operator's schema. The None arguments are for caches, rotation, FP8, sinks and schedules.
    out, log_sum, *_ = torch.ops._vllm_fa3_C.fwd(
        query, key, value, None, None, None, None, plan.query_starts, plan.key_starts, None, None, None,
        max(plan.query_lengths), max(plan.key_lengths), None, None, None, None, None, None, None, None, None,
        scale, plan.causal, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return out, log_sum


@cache
def _load_build() -> None:
    torch.ops.load_library(os.environ[BUILD_VARIABLE])
