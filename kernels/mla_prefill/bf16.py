"""Our attention over prompts of bf16 on Hopper: `cuda/bf16_prefill.cu`."""

from pathlib import Path

import torch

from kernels.act_quant import QuantizedRows
from kernels.mla_prefill.hopper_inputs import THREADS, Results, blocks_of_launch, prepare_inputs
from kernels.mla_prefill.plan import PrefillPlan
from kernels.mla_prefill.tiles import KEYS
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "bf16_prefill.cu"
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
    _attend("attend_prompts", query, own, shared, value, plan, (out, None), scale)


def attend_and_quantize(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: QuantizedRows,
    scale: float,
) -> None:
    results = out.values, out.scales.t()
    _attend("attend_prompts_and_quantize", query, own, shared, value, plan, results, scale)


def _attend(
    name: str,
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    results: Results,
    scale: float,
) -> None:
    if not query.shape[0]:
        return
    assert plan.tiles is not None and plan.taken is not None
    inputs = prepare_inputs(
        query, own, shared, value, results, plan.taken, tile_count=plan.tiles.shape[0], box_keys=KEYS, scale=scale
    )
    kernel = load_kernel(SOURCE, name, query.device.index or 0)
    arguments = Arguments(inputs=inputs, tiles=plan.tiles.data_ptr())
    kernel.launch((blocks_of_launch(inputs.tile_count * inputs.heads, query.device), 1, 1), THREADS, arguments)
