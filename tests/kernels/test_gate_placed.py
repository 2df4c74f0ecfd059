"""The norm and the gate of few tokens in one kernel on Hopper, and the experts that read its lists, as defined."""

import pytest
import torch

from kernels.grouped_gemm import listed_feed_forward
from kernels.moe_gate import Routing, add_rms_norm_and_choose, placed, reference
from kernels.moe_permute import ExpertOutputs
from kernels.norm import Delta, add_rms_norm
from kernels.norm import reference as norms
from kernels.swiglu import reference as swiglu_reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper
from tests.support.listed_rows import assert_same_lists, list_rows
from tests.support.replays import Step, assert_replays_are_exact

HIDDEN, REPLAYS = 2048, 100
# Moonlight's, GLM-4.7-Flash's and DeepSeek-V2-Lite's gates, and one among more experts.
GATES = [
    pytest.param(64, Routing(6, 1, 1, normalize=True, scaling=2.446, shared=2), id="Moonlight"),
    pytest.param(64, Routing(4, 1, 1, normalize=True, scaling=1.8, shared=1), id="GLM"),
    pytest.param(64, Routing(6, 1, 1, normalize=False, scaling=1.0, shared=2, softmax=True), id="V2-Lite"),
    pytest.param(128, Routing(8, 1, 1, normalize=True, scaling=2.5, shared=0), id="128 experts"),
]
pytestmark = [pytest.mark.gpu, on_hopper]
poisoned = pytest.mark.usefixtures("poisoned")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@poisoned
@pytest.mark.parametrize("padding", [0, 2, 32])
@pytest.mark.parametrize("width", [HIDDEN, 1536, 640])
@pytest.mark.parametrize("tokens", [2, 7, 16, 17, 32])
@pytest.mark.parametrize(("experts", "routing"), GATES)
def test_choices_and_their_rows_are_the_definitions(
    experts: int, routing: Routing, tokens: int, width: int, padding: int
) -> None:
    delta, residual, norm = random(tokens, width + 64)[:, :width], random(tokens, width) * 3, random(width)
    weight, hidden, added = random(experts, width) / width**0.5, torch.empty_like(residual), residual.clone()
    norms.add_rms_norm(delta, added, norm, 1e-6, hidden, None)
    bias = torch.zeros(experts, device="cuda") if routing.softmax else torch.randn(experts, device="cuda") / 10
    known = max(tokens - padding, 0)
    counted = torch.arange(tokens, device="cuda") < known if padding else None
    found, weights, chosen, listed = add_rms_norm_and_choose(
        delta, residual, norm, 1e-6, weight, bias, routing, counted
    )
    assert torch.equal(residual, added) and relative_error(found, hidden) < 1e-3
    logits = found.float() @ weight.float().t()
    expected_weights, expected = reference.moe_gate(logits, bias, routing, counted)
    order, expected_order = chosen.argsort(dim=1), expected.argsort(dim=1)
    # Two choices may be so close that sums in another order swap them.
    same = (chosen.gather(1, order) == expected.gather(1, expected_order)).all(dim=1)
    assert (~same).sum() <= 1
    assert torch.equal(chosen[:, routing.experts_per_token :], expected[:, routing.experts_per_token :])
    same[known:] = False
    if same.any():
        assert relative_error(weights.gather(1, order)[same], expected_weights.gather(1, expected_order)[same]) < 1e-4
    assert_same_lists(listed, list_rows(chosen, experts + routing.shared, routing.shared))


@poisoned
def test_equal_experts_are_chosen_once_and_nan_last() -> None:
    routing = Routing(6, 1, 1, normalize=True, scaling=1.0, shared=0)
    hidden, weight, bias = random(3, HIDDEN), random(64, HIDDEN), torch.zeros(64, device="cuda")
    hidden[0] = 0
    hidden[1] = float("nan")
    weight[10:] = torch.where(torch.arange(HIDDEN, device="cuda") == 0, float("inf"), 0.0)
    hidden[2, 0] = 0
    residual, norm = torch.zeros_like(hidden), torch.ones(HIDDEN, device="cuda").bfloat16()
    chosen = add_rms_norm_and_choose(hidden, residual, norm, 1e-6, weight, bias, routing).experts
    assert all(len(set(row)) == 6 and set(row) <= set(range(64)) for row in chosen.tolist())
    assert set(chosen[2].tolist()) <= set(range(10))


@poisoned
@pytest.mark.parametrize("tokens", [2, 16, 27, 32])
@pytest.mark.parametrize("width", [1408, 1536])
@pytest.mark.parametrize(("experts", "routing"), GATES[:2])
def test_experts_read_the_tokens_that_are_listed(experts: int, routing: Routing, width: int, tokens: int) -> None:
    count = experts + routing.shared
    gate_up = random(count, 2 * width, HIDDEN) / HIDDEN**0.5
    down, bias = random(count, HIDDEN, width) / width**0.5, torch.zeros(experts, device="cuda")
    counted = torch.arange(tokens, device="cuda") != 1
    delta, residual, norm = random(tokens, HIDDEN), random(tokens, HIDDEN), random(HIDDEN)
    gate = random(experts, HIDDEN)
    hidden, _, chosen, listed = add_rms_norm_and_choose(delta, residual, norm, 1e-6, gate, bias, routing, counted)
    found = listed_feed_forward(hidden, listed, gate_up, down)
    for expert in range(count):
        tokens_of, places = (chosen == expert).nonzero(as_tuple=True)
        inner = swiglu_reference.swiglu(hidden[tokens_of].float() @ gate_up[expert].float().t())
        rows = found[listed.positions[tokens_of, places]].float()
        assert not len(tokens_of) or relative_error(rows, inner @ down[expert].float().t()) < 0.01


@pytest.mark.parametrize("tokens", [2, 16, 32])
def test_a_captured_gate_with_its_experts_computes_what_they_do(tokens: int) -> None:
    layers, experts, width, routing = 4, 64, 256, Routing(4, 1, 1, normalize=True, scaling=1.8, shared=1)
    norms = torch.rand(layers, HIDDEN, device="cuda").bfloat16()
    gates = random(layers, experts, HIDDEN) / HIDDEN**0.5
    gate_up = random(layers, experts + 1, 2 * width, HIDDEN) / HIDDEN**0.5
    down = random(layers, experts + 1, HIDDEN, width) / width**0.5
    bias = torch.randn(experts, device="cuda") / 10

    def chain(delta: torch.Tensor, after_each: Step) -> torch.Tensor:
        residual, found = torch.zeros_like(delta), []
        added: Delta = delta
        for norm, gate, first, second in zip(norms, gates, gate_up, down, strict=True):
            # Twice, as after attention and after experts.
            attended = add_rms_norm(added, residual, norm, 1e-6)
            after_each()
            hidden, weights, chosen, listed = add_rms_norm_and_choose(
                attended, residual, norm, 1e-6, gate, bias, routing
            )
            after_each()
            rows = listed_feed_forward(hidden, listed, first, second)
            after_each()
            added = ExpertOutputs(rows, listed.positions, weights)
            found += [hidden.double(), weights.double(), chosen.double(), listed.positions.double()]
        return torch.cat([*found, add_rms_norm(added, residual, norms[0], 1e-6).double()], dim=1)

    assert_replays_are_exact(chain, (tokens, HIDDEN), REPLAYS)


def test_one_token_many_tokens_and_other_gates_are_not_taken() -> None:
    hidden, weight, routing = random(4, HIDDEN), random(64, HIDDEN), Routing(4, 1, 1, True, 1.0, 1)
    assert placed.takes(hidden, weight, routing)
    assert not placed.takes(hidden[:1], weight, routing)
    assert not placed.takes(random(33, HIDDEN), weight, routing)
    assert not placed.takes(random(4, 4096), random(64, 4096), routing)
    assert not placed.takes(hidden, random(256, HIDDEN), routing)
    assert not placed.takes(hidden, weight.float(), routing)
    assert not placed.takes(hidden, weight, Routing(4, 8, 4, True, 1.0, 1))
    assert not placed.takes(hidden, weight, Routing(9, 1, 1, True, 1.0, 1))
