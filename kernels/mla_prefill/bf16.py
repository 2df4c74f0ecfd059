"""Our attention over prompts of bf16 on Hopper: `cuda/bf16_prefill.cu`, for some widths of heads."""

import torch

from kernels.act_quant.quantized import QuantizedRows, cuda_macros
from kernels.mla_prefill.hopper_inputs import THREADS, Results, blocks_of_launch, can_copy, prepare_inputs
from kernels.mla_prefill.plan import PrefillPlan
from kernels.mla_prefill.sources import CUDA, SOURCES
from kernels.nvrtc import load_kernel
from kernels.structures import structure

# All sources include the first one, and have its arguments.
Arguments = structure(CUDA / "bf16_prefill.cu", "Arguments")


def takes(query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether one of the sources computes it."""
    return (own.shape[2], shared.shape[1], value.shape[2]) in SOURCES and can_copy(query, own, shared, value)


def takes_quantized(query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether one of the sources computes outputs that are quantized in groups of 128: a head must have whole ones."""
    return value.shape[2] % 128 == 0 and takes(query, own, shared, value)


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
    macros = cuda_macros(out.powers)
    _attend("attend_prompts_and_quantize", query, own, shared, value, plan, results, scale, macros)


def _attend(
    name: str,
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    results: Results,
    scale: float,
    macros: tuple[str, ...] = (),
) -> None:
    if not query.shape[0]:
        return
    assert plan.tiles is not None and plan.taken is not None
    source, keys = SOURCES[own.shape[2], shared.shape[1], value.shape[2]]
    inputs = prepare_inputs(
        query, own, shared, value, results, plan.taken, tile_count=plan.tiles.shape[0], box_keys=keys, scale=scale
    )
    kernel = load_kernel(source, name, query.device.index or 0, macros)
    arguments = Arguments(inputs=inputs, tiles=plan.tiles.data_ptr())
    kernel.launch((blocks_of_launch(inputs.tile_count * inputs.heads, query.device), 1, 1), THREADS, arguments)
