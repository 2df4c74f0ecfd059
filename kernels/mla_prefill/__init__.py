"""Prefill attention of MLA in its expanded form: multi-head attention with keys wider than values."""

import torch

from kernels.act_quant import QuantizedRows, quantize_into
from kernels.mla_prefill import fp8_reference, reference
from kernels.mla_prefill.plan import PrefillPlan, plan_prefill

__all__ = [
    "PrefillPlan",
    "attend_and_quantize",
    "merge_attention",
    "mla_prefill",
    "plan_prefill",
    "quantized_mla_prefill",
]


def mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * query . key) @ value per head and prompt, and the log of each softmax's denominator.

    query: [queries, heads, 192]; own: [keys, heads, 128], each head's own part of the keys; shared: [keys, 64], the
    part that all heads share; value: [keys, heads, 128]; any widths, last dimension contiguous, one dtype, the plan's
    prompts one after another. Causal: query i of a prompt sees its keys 0 .. keys - queries + i. Returns
    [queries, heads, 128] of the query's dtype and [heads, queries] float32, the natural log of
    sum(exp(scale * query . key)), for `merge_attention`. No queries give none. On a GPU this runs our CUDA kernel for
    DeepSeek's widths in bf16 on Hopper, and our Triton kernel for all else.
    """
    _check(query, own, shared, value, plan)
    assert not plan.quantized
    if not query.is_cuda:
        return reference.mla_prefill(query, own, shared, value, plan, scale)
    # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
    from kernels.mla_prefill import bf16, hopper_inputs, triton

    if hopper_inputs.takes(query, own, shared, value):
        return bf16.mla_prefill(query, own, shared, value, plan, scale)
    return triton.mla_prefill(query, own, shared, value, plan, scale)


def quantized_mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_prefill` with queries, keys, weights and values in e4m3: `fp8_reference` defines how they are rounded.

    Inputs and results as there. On a Hopper GPU this runs our CUDA kernels for DeepSeek's widths in bf16; all else, and
    every other GPU, runs the definition, which is slow.
    """
    _check(query, own, shared, value, plan)
    assert plan.quantized
    if query.is_cuda:
        from kernels.mla_prefill import fp8, hopper_inputs

        if hopper_inputs.takes(query, own, shared, value):
            return fp8.mla_prefill(query, own, shared, value, plan, scale)
    return fp8_reference.mla_prefill(query, own, shared, value, plan, scale)


def attend_and_quantize(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: QuantizedRows,
    *,
    scale: float,
) -> None:
    """Attend as the plan says, and quantize the outputs for the product that reads them; they cannot be merged then.

    Inputs as in `mla_prefill`; out: [queries, heads * 128], which the outputs of all heads fill.
    """
    _check(query, own, shared, value, plan)
    assert out.values.shape == (query.shape[0], query.shape[1] * value.shape[2])
    if query.is_cuda:
        from kernels.mla_prefill import bf16, fp8, hopper_inputs

        if hopper_inputs.takes(query, own, shared, value):
            fused = fp8.attend_and_quantize if plan.quantized else bf16.attend_and_quantize
            fused(query, own, shared, value, plan, out, scale)
            return
    attend = quantized_mla_prefill if plan.quantized else mla_prefill
    values, _ = attend(query, own, shared, value, plan, scale=scale)
    quantize_into(values.flatten(1), out)


def merge_attention(
    out: torch.Tensor, log_sum: torch.Tensor, other_out: torch.Tensor, other_log_sum: torch.Tensor
) -> None:
    """Merge attention over two disjoint sets of keys into `out` and `log_sum`, as if it were computed over both.

    Both pairs as `mla_prefill` returns them, for the same queries. So a long cached prefix can be attended to in parts,
    which bounds the memory of its expanded keys and values (Dao et al., "FlashDecoding", 2023).
    """
    assert out.shape == other_out.shape and log_sum.shape == other_log_sum.shape == (out.shape[1], out.shape[0])
    assert log_sum.dtype == other_log_sum.dtype == torch.float32
    if out.is_cuda:
        from kernels.mla_prefill import triton

        triton.merge_attention(out, log_sum, other_out, other_log_sum)
    else:
        reference.merge_attention(out, log_sum, other_out, other_log_sum)


def _check(
    query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor, plan: PrefillPlan
) -> None:
    assert own.shape[:2] == value.shape[:2] and shared.shape[0] == own.shape[0]
    assert query.shape[1:] == (own.shape[1], own.shape[2] + shared.shape[1])
    assert query.shape[0] == plan.queries and own.shape[0] == plan.keys
    assert query.dtype == own.dtype == shared.dtype == value.dtype
