"""Decode attention by flash_mla, for bf16 on Hopper: by its package, or by a build of its operators.

`DEEPMESH_FLASH_MLA` names such a build (`_flashmla_C...so`, as vLLM's wheel carries it), which needs no package.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from kernels.hopper import is_hopper
from kernels.mla_decode.plan import DecodePlan

BUILD_VARIABLE = "DEEPMESH_FLASH_MLA"
LATENT, WIDTH = 512, 576


@cache
def available() -> bool:
    """Whether there is a Hopper GPU, and the package or a build."""
    return is_hopper() and (BUILD_VARIABLE in os.environ or find_spec("flash_mla") is not None)


def takes(query: torch.Tensor, pool: torch.Tensor, value_width: int) -> bool:
    shape = (value_width, pool.shape[2])
    return available() and query.dtype == pool.dtype == torch.bfloat16 and shape == (LATENT, WIDTH)


def mla_decode(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> torch.Tensor:
    """Same as `kernels.mla_decode.mla_decode`. A plan's first call makes the schedule."""
    tokens, heads, width = query.shape
    if not tokens:
        return query.new_empty(0, heads, LATENT)
    from kernels.dependent_launch import let_all_end

    rows = query.view(plan.rows, plan.query_tokens, heads, width)
    attend = _attend_by_build if BUILD_VARIABLE in os.environ else _attend_by_package
    # Its kernels may start before the previous kernel has ended, and not all of them wait for it: the attention kernel
    # reads queries at once, and the combining one ends at once if no request was split.
    let_all_end()
    out = attend(rows, pool.unsqueeze(2), plan, scale)
    let_all_end()
    return out.view(tokens, heads, LATENT)


def _attend_by_build(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> torch.Tensor:
    _load_build()
    schedule = plan.schedule
    out: torch.Tensor
    out, _, schedule.metadata, schedule.splits = torch.ops._flashmla_C.dense_decode_fwd(
        query, pool, LATENT, plan.lengths, plan.block_table, scale, plan.query_tokens > 1,
        schedule.metadata, schedule.splits, None,
    )  # fmt: skip
    return out


def _attend_by_package(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> torch.Tensor:
    package, schedule = import_module("flash_mla"), plan.schedule
    if schedule.metadata is None:
        schedule.metadata, schedule.splits = package.get_mla_metadata()
    out: torch.Tensor
    out, _ = package.flash_mla_with_kvcache(
        query, pool, plan.block_table, plan.lengths, LATENT, schedule.metadata, schedule.splits,
        softmax_scale=scale, causal=plan.query_tokens > 1,
    )  # fmt: skip
    return out


@cache
def _load_build() -> None:
    torch.ops.load_library(os.environ[BUILD_VARIABLE])
