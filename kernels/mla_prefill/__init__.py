"""Prefill attention of MLA in its expanded form: multi-head attention with keys wider than values."""

from collections.abc import Callable

import torch

from kernels.act_quant import QuantizedRows, quantize_into
from kernels.hopper import is_hopper
from kernels.mla_prefill import fp8_reference, reference
from kernels.mla_prefill.mask import causal_mask, empty_mask, seen_keys, write_mask
from kernels.mla_prefill.plan import PrefillPlan, plan_prefill
from kernels.mla_prefill.sources import MASKED

__all__ = [
    "PrefillPlan",
    "attend_and_quantize",
    "causal_mask",
    "empty_mask",
    "mla_prefill",
    "plan_prefill",
    "takes_masks",
    "write_mask",
]

# Query, both parts of the keys, values, the plan, outputs and the scale, as `mla_prefill` takes them.
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PrefillPlan, torch.Tensor, float],
    None,
]


def mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
) -> None:
    """softmax(scale * query . key) @ value per head and prompt, into `out`.

    query: [queries, heads, 192]; own: [keys, heads, 128], each head's own part of the keys; shared: [keys, 64], the
    part that all heads share; value: [keys, heads, 128]; any widths, last dimension contiguous, one dtype, the plan's
    prompts one after another. Query i of a prompt sees its keys 0 .. keys - queries + i. out: [queries, heads, 128] of
    the query's dtype; it may be some heads of a larger one. If the plan quantizes, queries, keys, weights and values
    are multiplied in e4m3: `fp8_reference` defines how they are rounded. mask: of one prompt, if each query attends
    only to some of the keys that it sees, and at least to one; it hides later keys too: see `kernels.mla_prefill.mask`.

    On a Hopper GPU this runs our CUDA kernels in bf16, for the widths of `sources.SOURCES`, and in e4m3, or with a mask
    in bf16, for DeepSeek-V3's. All else on a GPU runs our Triton kernel, or, if the plan quantizes or there is a mask,
    the definition, which is slow.
    """
    _check(query, own, shared, value, plan, mask)
    assert out.shape == (*query.shape[:2], value.shape[2]) and out.dtype == query.dtype
    assert out.stride()[1:] == (value.shape[2], 1)
    if query.is_cuda and not plan.quantized:
        # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
        from kernels.mla_prefill import bf16

        if bf16.takes(query, own, shared, value, masked=mask is not None):
            bf16.mla_prefill(query, own, shared, value, plan, out, scale, mask)
            return
    if mask is not None:
        seen = seen_keys(mask, plan.queries, plan.keys)
        reference.mla_prefill(query, own, shared, value, plan, out, scale, seen)
        return
    _implementation(query, own, shared, value, plan)(query, own, shared, value, plan, out, scale)


def attend_and_quantize(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: QuantizedRows,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
) -> None:
    """`mla_prefill`, whose outputs are quantized for the product that reads them.

    out: [queries, heads * 128], which the outputs of all heads fill; it may have some groups of larger rows.
    """
    _check(query, own, shared, value, plan, mask)
    (queries, heads, _), width = query.shape, value.shape[2]
    assert out.values.shape == (queries, heads * width)
    if query.is_cuda:
        from kernels.mla_prefill import bf16, fp8, hopper_inputs

        if not plan.quantized and bf16.takes_quantized(query, own, shared, value, masked=mask is not None):
            bf16.attend_and_quantize(query, own, shared, value, plan, out, scale, mask)
            return
        if plan.quantized and hopper_inputs.takes(query, own, shared, value):
            fp8.attend_and_quantize(query, own, shared, value, plan, out, scale)
            return
    values = query.new_empty(queries, heads, width)
    mla_prefill(query, own, shared, value, plan, values, scale=scale, mask=mask)
    quantize_into(values.flatten(1), out)


def takes_masks(own: int, shared: int, value: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention of heads of these widths is about as fast with a mask as without: on a GPU, if our Hopper
    kernel computes it.
    """
    if device.type != "cuda":
        return True
    return (own, shared, value) in MASKED and dtype == torch.bfloat16 and is_hopper(device)


def _implementation(
    query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor, plan: PrefillPlan
) -> Attend:
    definition = fp8_reference.mla_prefill if plan.quantized else reference.mla_prefill
    if not query.is_cuda:
        return definition
    from kernels.mla_prefill import fp8, hopper_inputs, triton

    if plan.quantized:
        return fp8.mla_prefill if hopper_inputs.takes(query, own, shared, value) else definition
    return triton.mla_prefill


def _check(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    mask: torch.Tensor | None,
) -> None:
    assert own.shape[:2] == value.shape[:2] and shared.shape[0] == own.shape[0]
    assert query.shape[1:] == (own.shape[1], own.shape[2] + shared.shape[1])
    assert query.shape[0] == plan.queries and own.shape[0] == plan.keys
    assert query.dtype == own.dtype == shared.dtype == value.dtype
    if mask is not None:
        assert len(plan.query_lengths) == 1 and not plan.quantized and mask.is_contiguous()
        assert mask.shape == empty_mask(plan.queries, plan.keys, torch.device("meta")).shape
