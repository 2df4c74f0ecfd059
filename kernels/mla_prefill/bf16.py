"""Our attention over prompts of bf16 on Hopper, for some widths of heads: `cuda/bf16_prefill.cu` and its variants."""

import torch

from kernels.act_quant.quantized import QuantizedRows, cuda_macros
from kernels.mla_prefill.hopper_inputs import THREADS, Results, blocks_of_launch, can_copy, prepare_inputs
from kernels.mla_prefill.plan import PrefillPlan
from kernels.mla_prefill.sources import CUDA, MASKED, SOURCES
from kernels.nvrtc import load_kernel
from kernels.structures import structure

# All sources without masks include the first one, and have its arguments.
Arguments = structure(CUDA / "bf16_prefill.cu", "Arguments")
MaskedArguments = structure(CUDA / "masked_prefill.cu", "MaskedArguments")


def takes(
    query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor, *, masked: bool = False
) -> bool:
    """Whether one of the sources computes it."""
    sources = MASKED if masked else SOURCES
    return (own.shape[2], shared.shape[1], value.shape[2]) in sources and can_copy(query, own, shared, value)


def takes_quantized(
    query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor, *, masked: bool = False
) -> bool:
    """Whether one of the sources computes outputs that are quantized in groups of 128: a head must have whole ones."""
    return value.shape[2] % 128 == 0 and takes(query, own, shared, value, masked=masked)


def mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
) -> None:
    _attend("attend_prompts", query, own, shared, value, plan, (out, None), scale, mask)


def attend_and_quantize(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: QuantizedRows,
    scale: float,
    mask: torch.Tensor | None = None,
) -> None:
    results = out.values, out.scales.t()
    macros = cuda_macros(out.powers)
    _attend("attend_prompts_and_quantize", query, own, shared, value, plan, results, scale, mask, macros)


def _attend(
    name: str,
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    results: Results,
    scale: float,
    mask: torch.Tensor | None,
    macros: tuple[str, ...] = (),
) -> None:
    if not query.shape[0]:
        return
    assert plan.tiles is not None and plan.taken is not None
    source, keys = (SOURCES if mask is None else MASKED)[own.shape[2], shared.shape[1], value.shape[2]]
    inputs = prepare_inputs(
        query, own, shared, value, results, plan.taken, tile_count=plan.tiles.shape[0], box_keys=keys, scale=scale
    )
    kernel = load_kernel(source, name, query.device.index or 0, macros)
    if mask is None:
        arguments = Arguments(inputs=inputs, tiles=plan.tiles.data_ptr())
    else:
        arguments = MaskedArguments(
            inputs=inputs, tiles=plan.tiles.data_ptr(), mask=mask.data_ptr(), mask_rows=mask.shape[1]
        )
    kernel.launch((blocks_of_launch(inputs.tile_count * inputs.heads, query.device), 1, 1), THREADS, arguments)
