"""Our attention over a prompt of bf16 to chosen keys on Hopper: `cuda/masked_prefill.cu`."""

from pathlib import Path

import torch

from kernels.act_quant.quantized import QuantizedRows, cuda_macros
from kernels.mla_prefill.hopper_inputs import THREADS, Results, blocks_of_launch, prepare_inputs
from kernels.mla_prefill.hopper_inputs import takes as takes
from kernels.mla_prefill.mask import BLOCK_KEYS
from kernels.mla_prefill.plan import PrefillPlan
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "masked_prefill.cu"
Arguments = structure(SOURCE, "Arguments")


def mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    mask: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    _attend("attend_prompts", query, own, shared, value, plan, mask, (out, None), scale)


def attend_and_quantize(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    mask: torch.Tensor,
    out: QuantizedRows,
    scale: float,
) -> None:
    results, macros = (out.values, out.scales.t()), cuda_macros(out.powers)
    _attend("attend_prompts_and_quantize", query, own, shared, value, plan, mask, results, scale, macros)


def _attend(
    name: str,
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    mask: torch.Tensor,
    results: Results,
    scale: float,
    macros: tuple[str, ...] = (),
) -> None:
    assert plan.tiles is not None and plan.taken is not None
    inputs = prepare_inputs(
        query, own, shared, value, results, plan.taken, tile_count=plan.tiles.shape[0], box_keys=BLOCK_KEYS, scale=scale
    )
    kernel = load_kernel(SOURCE, name, query.device.index or 0, macros)
    arguments = Arguments(inputs=inputs, tiles=plan.tiles.data_ptr(), mask=mask.data_ptr(), mask_rows=mask.shape[1])
    kernel.launch((blocks_of_launch(inputs.tile_count * inputs.heads, query.device), 1, 1), THREADS, arguments)
