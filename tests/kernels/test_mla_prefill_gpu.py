"""Prefill attention's backends against the reference; without a GPU, Triton's runs in the interpreter."""

from types import ModuleType

import pytest
import torch

from kernels.mla_prefill import PrefillPlan, cudnn, flash_attention, plan_prefill, reference
from kernels.mla_prefill import triton as ours

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.1


def error(backend: ModuleType, plan: PrefillPlan, heads: int, width: int, value_width: int) -> float:
    """Relative norm of the outputs' difference, or the largest difference of the log sums if that is more."""
    query = torch.randn(plan.queries, heads, width, device=DEVICE).bfloat16()
    key = torch.randn(plan.keys, heads, width, device=DEVICE).bfloat16()
    # A part of a wider tensor, as the expansion of latents makes them.
    value = torch.randn(plan.keys, heads, width + value_width, device=DEVICE).bfloat16()[:, :, width:]
    expected, expected_log_sum = reference.mla_prefill(query.float(), key.float(), value.float(), plan, SCALE)
    found, log_sum = backend.mla_prefill(query, key, value, plan, SCALE)
    assert found.shape == expected.shape and log_sum.shape == expected_log_sum.shape
    difference = (found.float() - expected).norm() / expected.norm()
    return max(float(difference), float((log_sum - expected_log_sum).abs().max()))


PLANS = {
    "one token": ([1], [1], True),
    "prompt": ([70], [70], True),
    "ragged": ([5, 129, 1], [5, 129, 1], True),
    "cached prefixes": ([5, 130, 1], [70, 131, 200], True),
    "a part of a prefix": ([5, 70], [100, 7], False),
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


@plans
def test_triton_attends_as_the_reference_does(plan: tuple[list[int], list[int], bool]) -> None:
    queries, keys, causal = plan
    assert error(ours, plan_prefill(queries, keys, DEVICE, causal=causal), 2, 24, 16) < 0.01


def test_triton_merges_parts_as_the_reference_does() -> None:
    out, other = torch.randn(2, 5, 3, 16, device=DEVICE).bfloat16()
    log_sum, other_log_sum = torch.randn(2, 3, 5, device=DEVICE) * 4
    expected, expected_log_sum = out.clone(), log_sum.clone()
    reference.merge_attention(expected, expected_log_sum, other, other_log_sum)
    ours.merge_attention(out, log_sum, other, other_log_sum)
    assert torch.allclose(out, expected, atol=1e-2) and torch.allclose(log_sum, expected_log_sum, atol=1e-4)


@pytest.mark.gpu
@plans
@pytest.mark.parametrize("backend", [ours, flash_attention, cudnn])
def test_every_backend_attends_at_deepseeks_shapes(
    plan: tuple[list[int], list[int], bool], backend: ModuleType
) -> None:
    queries, keys, causal = plan
    if backend is flash_attention and not flash_attention.available():
        pytest.skip("FlashAttention-3 is not installed")
    if backend is cudnn and causal and queries != keys:
        pytest.skip("cuDNN takes no cached prefix")
    assert error(backend, plan_prefill(queries, keys, DEVICE, causal=causal), 128, 192, 128) < 0.01
