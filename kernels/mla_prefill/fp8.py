"""Our attention over prompts in FP8 on Hopper: `cuda/fp8_prefill.cu`."""

import math
from pathlib import Path

import torch

from kernels.act_quant.quantized import QuantizedRows, cuda_macros
from kernels.mla_prefill.hopper_inputs import (
    THREADS,
    VALUE,
    Results,
    address_and_stride,
    blocks_of_launch,
    boxes,
    heads_together,
)
from kernels.mla_prefill.key_blocks import WIDTH, KeyBlocks, quantize_blocks
from kernels.mla_prefill.plan import PrefillPlan
from kernels.mla_prefill.tiles import BLOCK_KEYS, QUERIES
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "fp8_prefill.cu"
Arguments = structure(SOURCE, "Arguments")


def mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    scale: float,
) -> None:
    if query.shape[0]:
        attend(query, quantize_blocks(own, shared, value, plan), plan, out, scale)


def attend(query: torch.Tensor, found: KeyBlocks, plan: PrefillPlan, out: torch.Tensor, scale: float) -> None:
    _attend("attend_prompts", query, found, plan, (out, None), scale)


def attend_and_quantize(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: QuantizedRows,
    scale: float,
) -> None:
    if query.shape[0]:
        found, results = quantize_blocks(own, shared, value, plan), (out.values, out.scales.t())
        _attend("attend_prompts_and_quantize", query, found, plan, results, scale, cuda_macros(out.powers))


def _attend(
    name: str,
    query: torch.Tensor,
    found: KeyBlocks,
    plan: PrefillPlan,
    results: Results,
    scale: float,
    macros: tuple[str, ...] = (),
) -> None:
    assert plan.tiles is not None and plan.taken is not None
    (_, heads, _), (out, of_rows) = query.shape, results
    blocks, tiles = found.keys.shape[1], plan.tiles.shape[0]
    address, stride = address_and_stride(of_rows)
    arguments = Arguments(
        query_boxes=boxes(query, QUERIES // 2), keys=found.keys.data_ptr(), values=found.values.data_ptr(),
        scales=found.scales.data_ptr(), tiles=plan.tiles.data_ptr(), taken=plan.taken.data_ptr(), out=out.data_ptr(),
        of_rows=address, tile_count=tiles, heads=heads, row_stride=stride,
        out_row=out.stride(0) * out.element_size(), blocks=blocks,
        heads_together=heads_together(blocks * BLOCK_KEYS * (WIDTH + VALUE), heads),
        query_head=query.stride(1) * query.element_size(), scale_log2=scale * math.log2(math.e),
    )  # fmt: skip
    kernel = load_kernel(SOURCE, name, query.device.index or 0, macros)
    kernel.launch((blocks_of_launch(tiles * heads, query.device), 1, 1), THREADS, arguments)
