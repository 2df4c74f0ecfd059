import pytest
import torch

from kernels.act_quant import dequantize, empty_quantized, quantize
from kernels.mla_prefill import (
    attend_and_quantize,
    merge_attention,
    mla_prefill,
    plan_prefill,
    quantized_mla_prefill,
    reference,
)

CPU = torch.device("cpu")
SCALE = 0.3


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def expected(query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """In float64, all scores at once."""
    key = torch.cat([own, shared.unsqueeze(1).expand(-1, own.shape[1], -1)], dim=2)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * SCALE
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(key.shape[0] - query.shape[0] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(2), value.double())


def prompt(queries: int, keys: int) -> Parts:
    return torch.randn(queries, 3, 24), torch.randn(keys, 3, 16), torch.randn(keys, 8), torch.randn(keys, 3, 16)


@pytest.mark.parametrize(("queries", "cached"), [(1, 0), (2, 0), (1, 77), (255, 0), (257, 0), (300, 100), (513, 1)])
def test_each_query_sees_the_prefix_and_what_came_before_it(queries: int, cached: int) -> None:
    parts = prompt(queries, queries + cached)
    found, _ = mla_prefill(*parts, plan_prefill([queries], [queries + cached], CPU), scale=SCALE)
    exact = expected(*parts)
    assert (found.double() - exact).norm() / exact.norm() < 1e-6


def test_prompts_of_one_step_do_not_see_each_other() -> None:
    prompts = [prompt(queries, keys) for queries, keys in [(5, 5), (1, 90), (70, 75)]]
    joined = [torch.cat(parts) for parts in zip(*prompts, strict=True)]
    query, own, shared, value = joined
    found, log_sum = mla_prefill(query, own, shared, value, plan_prefill([5, 1, 70], [5, 90, 75], CPU), scale=SCALE)
    alone = [mla_prefill(*one, plan_prefill([len(one[0])], [len(one[1])], CPU), scale=SCALE) for one in prompts]
    assert torch.equal(found, torch.cat([out for out, _ in alone]))
    assert torch.equal(log_sum, torch.cat([log_sum for _, log_sum in alone], dim=1))


def test_merged_parts_of_a_prefix_equal_one_pass() -> None:
    query, *keys = prompt(40, 140)
    own, shared, value = keys
    whole, whole_log_sum = mla_prefill(query, own, shared, value, plan_prefill([40], [140], CPU), scale=SCALE)
    own, shared, value = (part[100:] for part in keys)
    out, log_sum = mla_prefill(query, own, shared, value, plan_prefill([40], [40], CPU), scale=SCALE)
    for first, last in [(0, 70), (70, 100)]:
        own, shared, value = (part[first:last] for part in keys)
        plan = plan_prefill([40], [last - first], CPU, causal=False)
        merge_attention(out, log_sum, *mla_prefill(query, own, shared, value, plan, scale=SCALE))
    assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(log_sum, whole_log_sum, atol=1e-5)


def test_values_may_be_a_part_of_a_wider_tensor() -> None:
    query, own, shared, _ = prompt(70, 70)
    wide, plan = torch.randn(70, 3, 50), plan_prefill([70], [70], CPU)
    found, _ = mla_prefill(query, own, shared, wide[:, :, 30:], plan, scale=SCALE)
    assert torch.equal(found, mla_prefill(query, own, shared, wide[:, :, 30:].contiguous(), plan, scale=SCALE)[0])


def test_narrow_tiles_of_long_contexts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, plan = prompt(90, 100), plan_prefill([90], [100], CPU)
    wide, _ = mla_prefill(*parts, plan, scale=SCALE)
    monkeypatch.setattr(reference, "TILE_SCORES", 3 * 100 * 7)
    assert torch.allclose(mla_prefill(*parts, plan, scale=SCALE)[0], wide, atol=1e-6)


def test_no_prompts_give_nothing() -> None:
    out, log_sum = mla_prefill(*prompt(0, 0), plan_prefill([], [], CPU), scale=1.0)
    assert out.shape == (0, 3, 16) and log_sum.shape == (3, 0)


@pytest.mark.parametrize("quantized", [False, True])
def test_outputs_may_be_quantized_into_some_rows(quantized: bool) -> None:
    parts = torch.randn(7, 4, 24), torch.randn(9, 4, 16), torch.randn(9, 8), torch.randn(9, 4, 32)
    plan, out = plan_prefill([7], [9], CPU, quantized=quantized), empty_quantized(12, 128, device=CPU)
    attend_and_quantize(*parts, plan, out.rows(2, 9), scale=SCALE)
    values, _ = (quantized_mla_prefill if quantized else mla_prefill)(*parts, plan, scale=SCALE)
    assert torch.equal(dequantize(out)[2:9], dequantize(quantize(values.flatten(1))))
