"""Our attention to selected tokens on Hopper: the dense kernels' roles over gathered rows, a request for each query."""

import ctypes
from pathlib import Path

import torch

from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import Attended, DecodePlan, bf16, fp8
from kernels.mla_decode.parts import divide_work
from kernels.nvrtc import load_kernel
from kernels.structures import structure

CUDA = Path(__file__).parent / "cuda"
# With the roles of `mla_decode.bf16`, and of `mla_decode.fp8`.
BF16, FP8 = CUDA / "bf16_selected.cu", CUDA / "fp8_selected.cu"
ARGUMENTS = {source: structure(source, "SelectedArguments") for source in (BF16, FP8)}
Selection = structure(CUDA / "gather.cuh", "Selection")


def takes(query: torch.Tensor, pool: torch.Tensor, value_width: int) -> bool:
    """Whether these kernels compute it: DeepSeek's widths, on Hopper."""
    return bf16.takes(query, pool, value_width) or fp8.takes(query, pool, value_width)


def mla_selected(
    query: torch.Tensor,
    pool: torch.Tensor,
    plan: DecodePlan,
    tokens: torch.Tensor,
    value_width: int,
    scale: float,
    kv_scale: float,
) -> torch.Tensor:
    queries, heads, _ = query.shape
    out = torch.empty(queries, heads, value_width, dtype=query.dtype, device=query.device)
    if not queries:
        return out
    divided = divide_work(_each_query_alone(plan, tokens.shape[1]), heads, out, BLOCK_TOKENS)
    if pool.dtype == torch.bfloat16:
        source, threads, attention = BF16, bf16.THREADS, bf16.arguments(query, pool, divided, scale)
    else:
        source, threads, attention = FP8, fp8.THREADS, fp8.arguments(query, pool, divided, scale, kv_scale)
    arguments = ARGUMENTS[source](attention=attention, selection=_selection(tokens, plan))
    divided.attend(load_kernel(source, "selected", query.device.index or 0), threads, arguments)
    return Attended(out, divided.pieces).joined()


def _selection(tokens: torch.Tensor, plan: DecodePlan) -> ctypes.Structure:
    return Selection(
        tokens=tokens.data_ptr(), block_table=plan.block_table.data_ptr(), count=tokens.shape[1],
        table_stride=plan.block_table.stride(0), query_tokens=plan.query_tokens,
    )  # fmt: skip


def _each_query_alone(plan: DecodePlan, count: int) -> DecodePlan:
    """The plan in which each query is a row, whose context is what it selects. Made at a plan's first call."""
    made = plan.schedule.selected.get(count)
    if made is None:
        own = torch.arange(1 - plan.query_tokens, 1, dtype=torch.int32, device=plan.lengths.device)
        selected = (plan.lengths.unsqueeze(1) + own).flatten().clamp_(max=count)
        made = DecodePlan(plan.block_table, selected, 1, plan.written_tokens, runs=None)
        plan.schedule.selected[count] = made
    return made
