"""Prefill attention's backends against the reference; without a GPU, Triton's runs in the interpreter."""

import random

import pytest
import torch

from kernels.act_quant import dequantize, empty_quantized, quantize
from kernels.hopper import is_hopper
from kernels.mla_prefill import PrefillPlan, attend_and_quantize, mla_prefill, plan_prefill, reference
from kernels.mla_prefill import triton as triton_prefill

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.1
HEADS, OWN, ROPE, VALUE = 128, 128, 64, 128

hopper = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")


class Case:
    """Random queries, keys and values of a plan's prompts, as the model has them: parts of wider tensors."""

    def __init__(self, plan: PrefillPlan, heads: int, own: int, rope: int, value: int) -> None:
        self.plan = plan
        self.query = torch.randn(plan.queries, heads, own + rope, device=DEVICE).bfloat16()
        expanded = torch.randn(plan.keys, heads, own + value, device=DEVICE).bfloat16()
        self.own, self.value = expanded.split([own, value], dim=2)
        self.shared = torch.randn(plan.keys, 512 + rope, device=DEVICE).bfloat16()[:, 512:]

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.own, self.shared, self.value

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_prefill(*self.inputs, self.plan, scale=SCALE)

    def error(self, found: torch.Tensor, log_sum: torch.Tensor) -> float:
        """Relative norm of the outputs' difference, or the largest difference of the log sums if that is more."""
        query, own, shared, value = (part.float() for part in self.inputs)
        expected, expected_log_sum = reference.mla_prefill(query, own, shared, value, self.plan, SCALE)
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
    case = Case(plan_prefill(queries, keys, DEVICE, causal=causal), 2, 24, 8, 16)
    found = triton_prefill.mla_prefill(*case.inputs, case.plan, SCALE)
    assert case.error(*found) < 0.01


def test_triton_merges_parts_as_the_reference_does() -> None:
    out, other = torch.randn(2, 5, 3, 16, device=DEVICE).bfloat16()
    log_sum, other_log_sum = torch.randn(2, 3, 5, device=DEVICE) * 4
    expected, expected_log_sum = out.clone(), log_sum.clone()
    reference.merge_attention(expected, expected_log_sum, other, other_log_sum)
    triton_prefill.merge_attention(out, log_sum, other, other_log_sum)
    assert torch.allclose(out, expected, atol=1e-2) and torch.allclose(log_sum, expected_log_sum, atol=1e-4)


@pytest.mark.gpu
@plans
def test_triton_attends_at_deepseeks_shapes(plan: tuple[list[int], list[int], bool], poisoned: None) -> None:
    queries, keys, causal = plan
    case = Case(plan_prefill(queries, keys, DEVICE, causal=causal), HEADS, OWN, ROPE, VALUE)
    found = triton_prefill.mla_prefill(*case.inputs, case.plan, SCALE)
    assert case.error(*found) < 0.01


@hopper
@pytest.mark.gpu
@plans
@pytest.mark.parametrize("heads", [16, HEADS])
def test_prompts_are_attended_to_at_deepseeks_shapes(
    plan: tuple[list[int], list[int], bool], heads: int, poisoned: None
) -> None:
    queries, keys, causal = plan
    case = Case(plan_prefill(queries, keys, DEVICE, causal=causal), heads, OWN, ROPE, VALUE)
    assert case.error(*case.attend()) < 0.01


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_prompts_and_prefixes_are_attended_to(seed: int, poisoned: None) -> None:
    chosen = random.Random(seed)
    # Around the bounds of tiles of 128 queries, of which each half has its own warpgroup, and of blocks of 128 keys.
    edges = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    queries = [chosen.choice([*edges, chosen.randint(1, 1500)]) for _ in range(chosen.randint(1, 6))]
    keys = [count + chosen.choice([0, 0, *edges, chosen.randint(0, 2500)]) for count in queries]
    plan = plan_prefill(queries, keys, DEVICE, causal=chosen.random() < 0.7)
    case = Case(plan, chosen.choice([1, 3, 16, 32, 64]), OWN, ROPE, VALUE)
    assert case.error(*case.attend()) < 0.01


@hopper
@pytest.mark.gpu
@plans
@pytest.mark.parametrize("heads", [3, HEADS])
def test_outputs_are_quantized_into_some_rows(
    plan: tuple[list[int], list[int], bool], heads: int, poisoned: None
) -> None:
    queries, keys, causal = plan
    case = Case(plan_prefill(queries, keys, DEVICE, causal=causal), heads, OWN, ROPE, VALUE)
    first, stop = 5, 5 + case.plan.queries
    out = empty_quantized(stop + 3, heads * VALUE, device=DEVICE)
    out.values.view(torch.uint8).fill_(7)
    out.scales.fill_(7)
    attend_and_quantize(*case.inputs, case.plan, out.rows(first, stop), scale=SCALE)
    expected = case.attend()[0].flatten(1)
    # Three bits of a mantissa: some 2.7%.
    assert (dequantize(out)[first:stop] - expected).norm() < 0.04 * expected.norm()
    # Scales are of outputs that are not rounded to bf16 yet.
    assert torch.allclose(out.scales[first:stop], quantize(expected).scales, rtol=0.005)
    outside = [*range(first), *range(stop, stop + 3)]
    assert (out.values.view(torch.uint8)[outside] == 7).all() and (out.scales[outside] == 7).all()


@hopper
@pytest.mark.gpu
def test_more_keys_than_the_cache_holds_are_attended_to_in_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.mla_prefill import hopper_inputs

    # Two heads at a time, and one in the last group.
    monkeypatch.setattr(hopper_inputs, "CACHED_BYTES", 2 * 600 * (OWN + VALUE) * 2)
    case = Case(plan_prefill([300, 200], [400, 200], DEVICE), 7, OWN, ROPE, VALUE)
    assert case.error(*case.attend()) < 0.01


@hopper
@pytest.mark.gpu
def test_scores_far_above_the_earlier_ones_raise_the_reference() -> None:
    case = Case(plan_prefill([700], [700], DEVICE), 16, OWN, ROPE, VALUE)
    # From the last block, which comes first, to the first one scores grow by far more than the margin.
    growth = torch.linspace(20, 1, 700, device=DEVICE).bfloat16()
    case.own, case.shared = case.own * growth[:, None, None], case.shared * growth[:, None]
    assert case.error(*case.attend()) < 0.01


@hopper
@pytest.mark.gpu
def test_a_prompt_of_nan_leaves_its_neighbours_alone() -> None:
    case = Case(plan_prefill([100, 200, 77], [150, 200, 99], DEVICE), 16, OWN, ROPE, VALUE)
    expected, _ = case.attend()
    case.query[100:300] = case.own[150:350] = case.shared[150:350] = case.value[150:350] = float("nan")
    found, _ = case.attend()
    assert torch.equal(found[:100], expected[:100]) and torch.equal(found[300:], expected[300:])


@hopper
@pytest.mark.gpu
def test_captured_attention_repeats_bit_by_bit() -> None:
    case = Case(plan_prefill([700, 900], [1700, 900], DEVICE), 16, OWN, ROPE, VALUE)
    expected, expected_log_sum = case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, log_sum = case.attend()
    for _ in range(5):
        found.fill_(float("nan"))
        log_sum.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected) and torch.equal(log_sum, expected_log_sum)


@hopper
@pytest.mark.gpu
def test_rows_that_the_copy_engine_cannot_read_are_attended_to() -> None:
    case = Case(plan_prefill([150], [150], DEVICE), 4, OWN, ROPE, VALUE)
    # One head's keys after another's.
    case.own = case.own.transpose(0, 1).contiguous().transpose(0, 1)
    assert case.error(*case.attend()) < 0.01
