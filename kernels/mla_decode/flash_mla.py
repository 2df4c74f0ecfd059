"""Decode attention by flash_mla, for bf16 on Hopper: by its package, or by a build of its operators.

`DEEPMESH_FLASH_MLA` names such a build (`_flashmla_C...so`, as vLLM's wheel carries it), which needs no package.
Packages of this name differ. DeepSeek's made schedules of the lengths until 2026, and makes them at the first call
since; from 2026.09.30 on they have neither Hopper nor dense attention, which SGLang's has with `use_legacy` alone.
"""

import os
from collections.abc import Callable
from functools import cache
from inspect import signature
from types import ModuleType

import torch

from kernels.hopper import is_hopper
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import reference
from kernels.mla_decode.plan import DecodePlan, plan_decode
from kernels.vendor import find_package, is_right

PACKAGE = "flash_mla"
BUILD_VARIABLE = "DEEPMESH_FLASH_MLA"
LATENT, WIDTH = 512, 576
# The trial's lengths and heads, and the largest relative error that rounding to bfloat16 explains.
TRIAL_LENGTHS, TRIAL_HEADS, TRIAL_ERROR = (1, 70), 16, 0.02

# From queries [rows, query tokens, heads, width] and a pool [blocks, 64, 1, width] to [rows, query tokens, heads, 512].
Attend = Callable[[torch.Tensor, torch.Tensor, DecodePlan, float], torch.Tensor]


def available() -> bool:
    """Whether there is a Hopper GPU, and a package or a build that is right on it. The first call tries that."""
    return _attend() is not None


def takes(query: torch.Tensor, pool: torch.Tensor, value_width: int) -> bool:
    shape = (value_width, pool.shape[2])
    return query.dtype == pool.dtype == torch.bfloat16 and shape == (LATENT, WIDTH) and available()


def mla_decode(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> torch.Tensor:
    """Same as `kernels.mla_decode.mla_decode`. A plan's first call makes the schedule."""
    tokens, heads, width = query.shape
    if not tokens:
        return query.new_empty(0, heads, LATENT)
    from kernels.dependent_launch import let_all_end

    attend = _attend()
    assert attend is not None
    rows = query.view(plan.rows, plan.query_tokens, heads, width)
    # Its kernels may start before the previous kernel has ended, and not all of them wait for it: the attention kernel
    # reads queries at once, and the combining one ends at once if no request was split.
    let_all_end()
    out = attend(rows, pool.unsqueeze(2), plan, scale)
    let_all_end()
    return out.view(tokens, heads, LATENT)


def find_attention(device: torch.device) -> Attend | None:
    """The attention of the build that the variable names, else of the package; None if there is none or it is wrong."""
    if BUILD_VARIABLE in os.environ:
        attend: Attend = _attend_by_build
    else:
        package = find_package(PACKAGE, ["get_mla_metadata", "flash_mla_with_kvcache"])
        if package is None:
            return None
        attend = _by_package(package)
    return attend if is_right(PACKAGE, lambda: _error(attend, device), TRIAL_ERROR) else None


@cache
def _attend() -> Attend | None:
    return find_attention(torch.device("cuda")) if is_hopper() else None


def _attend_by_build(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> torch.Tensor:
    _load_build()
    schedule = plan.schedule
    out: torch.Tensor
    out, _, schedule.metadata, schedule.splits = torch.ops._flashmla_C.dense_decode_fwd(
        query, pool, LATENT, plan.lengths, plan.block_table, scale, plan.query_tokens > 1,
        schedule.metadata, schedule.splits, None,
    )  # fmt: skip
    return out


def _by_package(package: ModuleType) -> Attend:
    kept = {"use_legacy": True} if "use_legacy" in signature(package.flash_mla_with_kvcache).parameters else {}

    def attend(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, scale: float) -> torch.Tensor:
        schedule = plan.schedule
        if schedule.metadata is None:
            # Later versions ignore what they are given here.
            rows = query.shape[1] * query.shape[2]
            schedule.metadata, schedule.splits = package.get_mla_metadata(plan.lengths, rows, pool.shape[2])
        out: torch.Tensor
        out, _ = package.flash_mla_with_kvcache(
            query, pool, plan.block_table, plan.lengths, LATENT, schedule.metadata, schedule.splits,
            softmax_scale=scale, causal=plan.query_tokens > 1, **kept,
        )  # fmt: skip
        return out

    return attend


@cache
def _load_build() -> None:
    torch.ops.load_library(os.environ[BUILD_VARIABLE])


def _error(attend: Attend, device: torch.device) -> float:
    """The relative error of attention in small contexts of several blocks."""
    lengths = torch.tensor(TRIAL_LENGTHS, dtype=torch.int32, device=device)
    blocks = -(-max(TRIAL_LENGTHS) // BLOCK_TOKENS)
    rows = len(TRIAL_LENGTHS)
    table = torch.arange(rows * blocks, dtype=torch.int32, device=device).flip(0).view(rows, blocks)
    shapes = (rows * blocks, BLOCK_TOKENS, WIDTH), (rows, TRIAL_HEADS, WIDTH)
    generator = torch.Generator().manual_seed(0)
    pool, query = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    plan, scale = plan_decode(table, lengths), WIDTH**-0.5
    found = attend(query.unsqueeze(1), pool.unsqueeze(2), plan, scale).view(rows, TRIAL_HEADS, LATENT).float()
    expected = reference.mla_decode(query.float(), pool.float(), plan, LATENT, scale, 1.0)
    return float((found - expected).norm() / expected.norm())
