"""Sources that compute rows, on the CPU: norms, gated values, the gate's logits and its choice of experts."""

import pytest
import torch

from kernels.act_quant import Quantized, dequantize, empty_quantized
from kernels.moe_gate import reference as gate
from kernels.moe_gate.reference import Routing
from kernels.moe_permute import ExpertOutputs
from kernels.moe_permute.reference import combine
from kernels.norm import reference as norms
from kernels.swiglu import reference as gated
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error
from tests.support.power_scales import assert_rounded_up
from tests.support.softmax_gates import SOFTMAX_GATES

# Relative norms: sums in another order move some values over the border of two bfloat16 or e4m3 numbers.
ERROR, QUANTIZED_ERROR, CPU = 1e-3, 1e-2, torch.device("cpu")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("choices", [0, 5, 8])
def test_rows_are_added_normalized_and_quantized(choices: int, on_cpu: CudaOnCpu) -> None:
    clusters, rows, width = on_cpu.module("norm.clusters"), 3, 1024
    residual, weight, added = random(rows, width) * 5, random(width), random(rows, width)
    positions, weights = torch.randint(16, (rows, max(choices, 1))), torch.randn(rows, max(choices, 1))
    outputs = ExpertOutputs(random(2, 8, width), positions, weights, added)
    total, plain, quantized = residual.clone(), torch.empty_like(residual), empty_quantized(rows, width, device=CPU)
    norms.add_rms_norm(combine(outputs) if choices else added, total, weight, 1e-6, plain, quantized)
    found, found_quantized = torch.full_like(plain, float("nan")), empty_quantized(rows, width, device=CPU)
    clusters.add_rms_norm(outputs if choices else added, residual, weight, 1e-6, found, found_quantized)
    assert relative_error(residual, total) < ERROR and relative_error(found, plain) < ERROR
    assert relative_error(dequantize(found_quantized), dequantize(quantized)) < QUANTIZED_ERROR


def test_scales_of_groups_are_rounded_up_to_powers(on_cpu: CudaOnCpu) -> None:
    residual, weight, added, gate_up = random(3, 1024), random(1024), random(3, 1024) * 5, random(3, 4352)

    def normalized(powers: bool) -> Quantized:
        out = empty_quantized(3, 1024, device=CPU, powers=powers)
        on_cpu.module("norm.clusters").add_rms_norm(added, residual.clone(), weight, 1e-6, None, out)
        return out

    assert_rounded_up(normalized)
    assert_rounded_up(lambda powers: on_cpu.module("swiglu.bf16").swiglu_quantize(gate_up, None, powers))


@pytest.mark.parametrize("shares", [1, 5])
@pytest.mark.parametrize(("experts", "routing"), SOFTMAX_GATES)
def test_softmax_gates_choose_as_defined(experts: int, routing: Routing, shares: int, on_cpu: CudaOnCpu) -> None:
    logits, bias = torch.randn(shares, 9, experts), torch.zeros(experts)
    weights, found = on_cpu.module("moe_gate.choice").moe_gate(logits, bias, routing)
    expected_weights, expected = gate.moe_gate(logits.sum(0), bias, routing)
    order, expected_order = found.argsort(dim=1), expected.argsort(dim=1)
    assert torch.equal(found.gather(1, order), expected.gather(1, expected_order))
    assert relative_error(weights.gather(1, order), expected_weights.gather(1, expected_order)) < 1e-5


@pytest.mark.parametrize(("experts", "routing"), SOFTMAX_GATES)
def test_softmax_gates_choose_distinct_experts_of_nan(experts: int, routing: Routing, on_cpu: CudaOnCpu) -> None:
    logits = torch.randn(1, 4, experts)
    logits[0, 0, 3], logits[0, 1], logits[0, 2] = float("nan"), float("nan"), 0.0
    _, found = on_cpu.module("moe_gate.choice").moe_gate(logits, torch.zeros(experts), routing)
    routed = found[:, : routing.experts_per_token].tolist()
    assert all(len(set(row)) == len(row) and set(row) <= set(range(experts)) for row in routed)


@pytest.mark.parametrize("width", [128, 2176])
def test_rows_are_gated_and_quantized(width: int, on_cpu: CudaOnCpu) -> None:
    gate_up = random(3, 2 * width)
    found = on_cpu.module("swiglu.bf16").swiglu_quantize(gate_up, None)
    assert relative_error(dequantize(found), dequantize(gated.swiglu_quantize(gate_up))) < QUANTIZED_ERROR


@pytest.mark.parametrize(("shares", "shared"), [(1, 0), (5, 1)])
def test_the_gate_chooses_as_defined(shares: int, shared: int, on_cpu: CudaOnCpu) -> None:
    logits, bias = torch.randn(shares, 4, 256), torch.randn(256) * 0.1
    routing = Routing(8, 8, 4, True, 2.5, shared)
    weights, experts = on_cpu.module("moe_gate.choice").moe_gate(logits, bias, routing)
    expected_weights, expected = gate.moe_gate(logits.sum(0), bias, routing)
    order, expected_order = experts.argsort(dim=1), expected.argsort(dim=1)
    assert torch.equal(experts.gather(1, order), expected.gather(1, expected_order))
    assert relative_error(weights.gather(1, order), expected_weights.gather(1, expected_order)) < 1e-5


@pytest.mark.parametrize("tokens", [1, 40])
def test_logits_are_products_of_hidden_values(tokens: int, on_cpu: CudaOnCpu) -> None:
    hidden, weight = random(tokens, 576), random(64, 576)
    logits = on_cpu.module("linear.few_tokens").multiply_in_shares(hidden, weight)
    assert relative_error(logits.sum(0), hidden.float() @ weight.float().t()) < 1e-5
