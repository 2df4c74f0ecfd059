"""Our FP8 kernels of attention over prompts against their definition."""

import random

import pytest
import torch

from kernels.hopper import is_hopper
from kernels.mla_prefill import PrefillPlan, attend_and_quantize, fp8_reference, mla_prefill, plan_prefill
from tests.support.quantized_outputs import assert_quantized_into_some

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]

DEVICE = torch.device("cuda")
OWN, ROPE, VALUE = 128, 64, 128
SCALE = 0.1


class Case:
    """Random queries, keys and values of a plan's prompts, as the model has them: parts of wider tensors."""

    def __init__(self, plan: PrefillPlan, heads: int) -> None:
        self.plan = plan
        self.query = torch.randn(plan.queries, heads, OWN + ROPE, device=DEVICE).bfloat16()
        expanded = torch.randn(plan.keys, heads, OWN + VALUE, device=DEVICE).bfloat16()
        self.own, self.value = expanded.split([OWN, VALUE], dim=2)
        self.shared = torch.randn(plan.keys, 512 + ROPE, device=DEVICE).bfloat16()[:, 512:]

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.own, self.shared, self.value

    def attend(self) -> torch.Tensor:
        out = self.query.new_empty(*self.query.shape[:2], VALUE)
        mla_prefill(*self.inputs, self.plan, out, scale=SCALE)
        return out

    def assert_as_defined(self, tolerance: float = 0.02) -> None:
        """What lies on the border of two numbers of e4m3 may round either way: a weight, or a query's channel."""
        query, own, shared, value = (part.float() for part in self.inputs)
        expected = query.new_empty(*query.shape[:2], VALUE)
        fp8_reference.mla_prefill(query, own, shared, value, self.plan, expected, SCALE)
        assert (self.attend().float() - expected).norm() <= tolerance * expected.norm()


PLANS = {
    "one token": ([1], [1]),
    "prompt": ([70], [70]),
    "ragged": ([5, 129, 1], [5, 129, 1]),
    "cached prefixes": ([5, 130, 1], [70, 131, 200]),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("heads", [16, 128])
def test_prompts_are_attended_to_as_defined(plan: tuple[list[int], list[int]], heads: int, poisoned: None) -> None:
    Case(plan_prefill(*plan, DEVICE, quantized=True), heads).assert_as_defined()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_some_heads_leave_the_outputs_of_others_alone(plan: tuple[list[int], list[int]], poisoned: None) -> None:
    case = Case(plan_prefill(*plan, DEVICE, quantized=True), 16)
    found = torch.full((case.plan.queries, 21, VALUE), 7, dtype=torch.bfloat16, device=DEVICE)
    mla_prefill(*case.inputs, case.plan, found[:, 3:19], scale=SCALE)
    assert torch.equal(found[:, 3:19], case.attend())
    assert (found[:, :3] == 7).all() and (found[:, 19:] == 7).all()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_outputs_of_some_heads_are_quantized_into_some_rows(plan: tuple[list[int], list[int]], poisoned: None) -> None:
    case = Case(plan_prefill(*plan, DEVICE, quantized=True), 16)
    expected = case.attend().flatten(1)
    assert_quantized_into_some(
        lambda rows: attend_and_quantize(*case.inputs, case.plan, rows, scale=SCALE), expected, 3, 2 * VALUE
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_prompts_and_prefixes_are_attended_to_as_defined(seed: int, poisoned: None) -> None:
    chosen = random.Random(seed)
    # Around the bounds of tiles of 128 queries, of which each half has its own warpgroup, and of blocks of 160 keys.
    edges = [1, 2, 63, 64, 65, 127, 128, 129, 159, 160, 161, 320, 321]
    queries = [chosen.choice([*edges, chosen.randint(1, 1500)]) for _ in range(chosen.randint(1, 6))]
    keys = [count + chosen.choice([0, 0, *edges, chosen.randint(0, 2500)]) for count in queries]
    plan = plan_prefill(queries, keys, DEVICE, quantized=True)
    Case(plan, chosen.choice([1, 3, 16, 32])).assert_as_defined()


def test_scores_far_above_the_earlier_ones_raise_the_reference() -> None:
    case = Case(plan_prefill([700], [700], DEVICE, quantized=True), 16)
    # From the last block, which comes first, to the first one scores grow by far more than the margin.
    growth = torch.linspace(4, 1, 700, device=DEVICE).bfloat16()
    case.own, case.shared = case.own * growth[:, None, None], case.shared * growth[:, None]
    # Scores are large, and so are the differences of those in which a query rounds otherwise.
    case.assert_as_defined(tolerance=0.05)


def test_values_of_other_magnitudes_count_as_they_are() -> None:
    case = Case(plan_prefill([700], [700], DEVICE, quantized=True), 16)
    case.value = case.value * torch.logspace(-1, 1, 700, device=DEVICE).bfloat16()[:, None, None]
    case.assert_as_defined()


def test_long_sums_lose_little() -> None:
    plan = plan_prefill([128], [30000], DEVICE, quantized=True)
    case = Case(plan, 4)
    # Equal values, so that no product cancels another: the sums of the tensor cores are shorter than float32.
    case.value = torch.ones_like(case.value)
    found = case.attend()
    assert (found.float() - 1).abs().max() < 0.02


def test_a_prompt_of_nan_leaves_its_neighbours_alone() -> None:
    case = Case(plan_prefill([100, 200, 77], [150, 200, 99], DEVICE, quantized=True), 16)
    expected = case.attend()
    case.query[100:300] = case.own[150:350] = case.value[150:350] = case.shared[150:350] = float("nan")
    found = case.attend()
    assert torch.equal(found[:100], expected[:100]) and torch.equal(found[300:], expected[300:])


def test_captured_attention_repeats_bit_by_bit() -> None:
    case = Case(plan_prefill([700, 900], [1700, 900], DEVICE, quantized=True), 16)
    expected = case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.attend()
    for _ in range(5):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)


def test_rows_that_are_not_aligned_are_attended_to() -> None:
    case = Case(plan_prefill([150], [150], DEVICE, quantized=True), 4)
    case.own = case.own.transpose(0, 1).contiguous().transpose(0, 1)
    case.assert_as_defined()
