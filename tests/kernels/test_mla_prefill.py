import pytest
import torch

from kernels.act_quant import dequantize, empty_quantized, quantize
from kernels.mla_prefill import PrefillPlan, attend_and_quantize, mla_prefill, plan_prefill, reference

CPU = torch.device("cpu")
SCALE = 0.3


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def expected(query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """In float64, all scores at once."""
    key = torch.cat([own, shared.unsqueeze(1).expand(-1, own.shape[1], -1)], dim=2)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * SCALE
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(key.shape[0] - query.shape[0] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(2), value.double())


def attend(parts: Parts, plan: PrefillPlan) -> torch.Tensor:
    query, _, _, value = parts
    out = query.new_empty(*query.shape[:2], value.shape[2])
    mla_prefill(*parts, plan, out, scale=SCALE)
    return out


def prompt(queries: int, keys: int) -> Parts:
    return torch.randn(queries, 3, 24), torch.randn(keys, 3, 16), torch.randn(keys, 8), torch.randn(keys, 3, 16)


@pytest.mark.parametrize(("queries", "cached"), [(1, 0), (2, 0), (1, 77), (255, 0), (257, 0), (300, 100), (513, 1)])
def test_each_query_sees_the_prefix_and_what_came_before_it(queries: int, cached: int) -> None:
    parts = prompt(queries, queries + cached)
    found = attend(parts, plan_prefill([queries], [queries + cached], CPU))
    exact = expected(*parts)
    assert (found.double() - exact).norm() / exact.norm() < 1e-6


def test_prompts_of_one_step_do_not_see_each_other() -> None:
    prompts = [prompt(queries, keys) for queries, keys in [(5, 5), (1, 90), (70, 75)]]
    query, own, shared, value = (torch.cat(parts) for parts in zip(*prompts, strict=True))
    found = attend((query, own, shared, value), plan_prefill([5, 1, 70], [5, 90, 75], CPU))
    alone = [attend(one, plan_prefill([len(one[0])], [len(one[1])], CPU)) for one in prompts]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("quantized", [False, True])
def test_some_heads_leave_the_outputs_of_others_alone(quantized: bool) -> None:
    query, own, shared, value = prompt(70, 200)
    plan, some = plan_prefill([70], [200], CPU, quantized=quantized), slice(1, 3)
    expected = attend((query, own, shared, value), plan)
    found = torch.full_like(expected, 7)
    mla_prefill(query[:, some], own[:, some], shared, value[:, some], plan, found[:, some], scale=SCALE)
    assert torch.allclose(found[:, some], expected[:, some], atol=1e-6) and (found[:, 0] == 7).all()


def test_values_may_be_a_part_of_a_wider_tensor() -> None:
    query, own, shared, _ = prompt(70, 70)
    wide, plan = torch.randn(70, 3, 50), plan_prefill([70], [70], CPU)
    found = attend((query, own, shared, wide[:, :, 30:]), plan)
    assert torch.equal(found, attend((query, own, shared, wide[:, :, 30:].contiguous()), plan))


def test_narrow_tiles_of_long_contexts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, plan = prompt(90, 100), plan_prefill([90], [100], CPU)
    wide = attend(parts, plan)
    monkeypatch.setattr(reference, "TILE_SCORES", 3 * 100 * 7)
    assert torch.allclose(attend(parts, plan), wide, atol=1e-6)


def test_no_prompts_give_nothing() -> None:
    assert attend(prompt(0, 0), plan_prefill([], [], CPU)).shape == (0, 3, 16)


@pytest.mark.parametrize("quantized", [False, True])
def test_outputs_of_some_heads_may_be_quantized_into_some_rows(quantized: bool) -> None:
    query, own, shared, value = (
        torch.randn(7, 4, 24), torch.randn(9, 4, 16), torch.randn(9, 8), torch.randn(9, 4, 64)
    )  # fmt: skip
    plan, out = plan_prefill([7], [9], CPU, quantized=quantized), empty_quantized(12, 256, device=CPU)
    some, columns = slice(2, 4), out.rows(2, 9).columns(128, 256)
    attend_and_quantize(query[:, some], own[:, some], shared, value[:, some], plan, columns, scale=SCALE)
    values = attend((query, own, shared, value), plan)[:, some].flatten(1)
    assert torch.equal(dequantize(out)[2:9, 128:], dequantize(quantize(values)))
