"""Prefill attention's backends against the reference; without a GPU, Triton's runs in the interpreter."""

import random

import pytest
import torch

from kernels.hopper import is_hopper
from kernels.mla_prefill import PrefillPlan, attend_and_quantize, mla_prefill, plan_prefill, reference
from kernels.mla_prefill import triton as triton_prefill
from tests.support.quantized_outputs import assert_quantized_into_some

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.1
HEADS, OWN, ROPE, VALUE = 128, 128, 64, 128
# A head's own and shared channels of keys, and of values, in GigaChat3 and in GLM-4.7-Flash.
WIDE = pytest.mark.parametrize("widths", [(128, 64, 192), (192, 64, 256)], ids=["192", "256"])

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

    def attend(self) -> torch.Tensor:
        out = self.empty()
        mla_prefill(*self.inputs, self.plan, out, scale=SCALE)
        return out

    def empty(self) -> torch.Tensor:
        return self.query.new_empty(*self.query.shape[:2], self.value.shape[2])

    def error(self, found: torch.Tensor) -> float:
        """Relative norm of the outputs' difference."""
        query, own, shared, value = (part.float() for part in self.inputs)
        expected = self.empty().float()
        reference.mla_prefill(query, own, shared, value, self.plan, expected, SCALE)
        return float((found.float() - expected).norm() / expected.norm())


PLANS = {
    "one token": ([1], [1]),
    "prompt": ([70], [70]),
    "ragged": ([5, 129, 1], [5, 129, 1]),
    "cached prefixes": ([5, 130, 1], [70, 131, 200]),
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


@plans
def test_triton_attends_as_the_reference_does(plan: tuple[list[int], list[int]]) -> None:
    queries, keys = plan
    case = Case(plan_prefill(queries, keys, DEVICE), 2, 24, 8, 16)
    found = case.empty()
    triton_prefill.mla_prefill(*case.inputs, case.plan, found, SCALE)
    assert case.error(found) < 0.01


@pytest.mark.gpu
@plans
def test_triton_attends_at_deepseeks_shapes(plan: tuple[list[int], list[int]], poisoned: None) -> None:
    queries, keys = plan
    case = Case(plan_prefill(queries, keys, DEVICE), HEADS, OWN, ROPE, VALUE)
    found = case.empty()
    triton_prefill.mla_prefill(*case.inputs, case.plan, found, SCALE)
    assert case.error(found) < 0.01


@hopper
@pytest.mark.gpu
@plans
@pytest.mark.parametrize("heads", [16, HEADS])
def test_prompts_are_attended_to_at_deepseeks_shapes(
    plan: tuple[list[int], list[int]], heads: int, poisoned: None
) -> None:
    queries, keys = plan
    case = Case(plan_prefill(queries, keys, DEVICE), heads, OWN, ROPE, VALUE)
    assert case.error(case.attend()) < 0.01


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_prompts_and_prefixes_are_attended_to(seed: int, poisoned: None) -> None:
    chosen = random.Random(seed)
    plan = random_plan(chosen)
    case = Case(plan, chosen.choice([1, 3, 16, 32, 64]), OWN, ROPE, VALUE)
    assert case.error(case.attend()) < 0.01


def random_plan(chosen: random.Random) -> PrefillPlan:
    # Around the bounds of tiles of 128 queries, of which each half has its own warpgroup, and of blocks of 128 keys.
    edges = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    queries = [chosen.choice([*edges, chosen.randint(1, 1500)]) for _ in range(chosen.randint(1, 6))]
    keys = [count + chosen.choice([0, 0, *edges, chosen.randint(0, 2500)]) for count in queries]
    return plan_prefill(queries, keys, DEVICE)


@hopper
@pytest.mark.gpu
@WIDE
@plans
@pytest.mark.parametrize("heads", [1, 20])
def test_prompts_of_wide_heads_are_attended_to(
    plan: tuple[list[int], list[int]], widths: tuple[int, int, int], heads: int, poisoned: None
) -> None:
    case = Case(plan_prefill(*plan, DEVICE), heads, *widths)
    assert case.error(case.attend()) < 0.01


@hopper
@pytest.mark.gpu
@WIDE
@pytest.mark.parametrize("seed", range(20))
def test_random_prompts_of_wide_heads_are_attended_to(seed: int, widths: tuple[int, int, int], poisoned: None) -> None:
    case = Case(random_plan(random.Random(seed)), random.Random(seed).choice([1, 3, 20, 64]), *widths)
    assert case.error(case.attend()) < 0.01


@hopper
@pytest.mark.gpu
@plans
def test_outputs_256_wide_are_quantized_in_two_groups(plan: tuple[list[int], list[int]], poisoned: None) -> None:
    case = Case(plan_prefill(*plan, DEVICE), 5, 192, 64, 256)
    expected = case.attend().flatten(1)
    assert_quantized_into_some(
        lambda rows: attend_and_quantize(*case.inputs, case.plan, rows, scale=SCALE), expected, 5, 2 * 256
    )


@hopper
@pytest.mark.gpu
@plans
def test_some_heads_leave_the_outputs_of_others_alone(plan: tuple[list[int], list[int]], poisoned: None) -> None:
    case = Case(plan_prefill(*plan, DEVICE), 16, OWN, ROPE, VALUE)
    found = torch.full((case.plan.queries, 21, VALUE), 7, dtype=torch.bfloat16, device=DEVICE)
    mla_prefill(*case.inputs, case.plan, found[:, 3:19], scale=SCALE)
    assert case.error(found[:, 3:19]) < 0.01
    assert (found[:, :3] == 7).all() and (found[:, 19:] == 7).all()


@hopper
@pytest.mark.gpu
@plans
@pytest.mark.parametrize("heads", [3, HEADS])
def test_outputs_of_some_heads_are_quantized_into_some_rows(
    plan: tuple[list[int], list[int]], heads: int, poisoned: None
) -> None:
    case = Case(plan_prefill(*plan, DEVICE), heads, OWN, ROPE, VALUE)
    expected = case.attend().flatten(1)
    assert_quantized_into_some(
        lambda rows: attend_and_quantize(*case.inputs, case.plan, rows, scale=SCALE), expected, 5, 2 * VALUE
    )


@hopper
@pytest.mark.gpu
def test_keys_that_the_cache_cannot_hold_are_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.mla_prefill import hopper_inputs

    # Two heads at a time, and one in the last group.
    monkeypatch.setattr(hopper_inputs, "CACHED_BYTES", 2 * 600 * (OWN + VALUE) * 2)
    case = Case(plan_prefill([300, 200], [400, 200], DEVICE), 7, OWN, ROPE, VALUE)
    assert case.error(case.attend()) < 0.01


@hopper
@pytest.mark.gpu
def test_scores_far_above_the_earlier_ones_raise_the_reference() -> None:
    case = Case(plan_prefill([700], [700], DEVICE), 16, OWN, ROPE, VALUE)
    # From the last block, which comes first, to the first one scores grow by far more than the margin.
    growth = torch.linspace(20, 1, 700, device=DEVICE).bfloat16()
    case.own, case.shared = case.own * growth[:, None, None], case.shared * growth[:, None]
    assert case.error(case.attend()) < 0.01


@hopper
@pytest.mark.gpu
def test_a_prompt_of_nan_leaves_its_neighbours_alone() -> None:
    case = Case(plan_prefill([100, 200, 77], [150, 200, 99], DEVICE), 16, OWN, ROPE, VALUE)
    expected = case.attend()
    case.query[100:300] = case.own[150:350] = case.shared[150:350] = case.value[150:350] = float("nan")
    found = case.attend()
    assert torch.equal(found[:100], expected[:100]) and torch.equal(found[300:], expected[300:])


@hopper
@pytest.mark.gpu
def test_captured_attention_repeats_bit_by_bit() -> None:
    case = Case(plan_prefill([700, 900], [1700, 900], DEVICE), 16, OWN, ROPE, VALUE)
    expected = case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.attend()
    for _ in range(5):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)


@hopper
@pytest.mark.gpu
def test_rows_that_the_copy_engine_cannot_read_are_attended_to() -> None:
    case = Case(plan_prefill([150], [150], DEVICE), 4, OWN, ROPE, VALUE)
    # One head's keys after another's.
    case.own = case.own.transpose(0, 1).contiguous().transpose(0, 1)
    assert case.error(case.attend()) < 0.01
