"""Routed layers with given choices, on CPUs, and how they are reported."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from bench.node.mega_moe import INTERFACE, check_interface
from bench.node.routed_experts import RoutedLayer, draw_inputs, expert_bytes, make_layers, routed_config, touched
from bench.node.routed_table import INT4, MEGA, OURS, Row, merged, table
from engine.exchange.host import HostExchange
from engine.model.expert_group import ExpertGroup
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from kernels.block_quant import dequantize_blocks
from tests.support.rank_threads import on_each_rank

LAYOUT = Layout(dp=2, ep=2)
EXPERTS, TOKENS, HIDDEN, WIDTH = 16, 5, 256, 128


def _dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = torch.empty(values.shape)
    for each in zip(values, scales, out, strict=True):
        dequantize_blocks(*each)
    return out


def test_ranks_sum_what_the_given_experts_make_of_their_rows() -> None:
    config = replace(routed_config(EXPERTS, "fp8"), hidden_size=HIDDEN, moe_intermediate_size=WIDTH)

    def compute(peers: Peers) -> tuple[Any, ...]:
        cpu, exchange = torch.device("cpu"), HostExchange(peers)
        inputs = draw_inputs(config, ExpertGroup(exchange), TOKENS, 1, cpu)
        layer: RoutedLayer = make_layers(config, exchange, cpu, 1)[0]
        with torch.no_grad():
            sums = layer.compute(inputs)
        gate_up, gate_up_scales, down, down_scales = layer.experts.weights()
        return inputs, sums, _dequantized(gate_up, gate_up_scales), _dequantized(down, down_scales)

    by_rank = on_each_rank(LAYOUT, compute)
    gate_up, down = (torch.cat([found[index] for found in by_rank]) for index in (2, 3))
    assert all(torch.equal(found[0].all_choices, by_rank[0][0].all_choices) for found in by_rank)
    for rank, (inputs, sums, *_) in enumerate(by_rank):
        assert torch.equal(inputs.choices, inputs.all_choices[rank * TOKENS : (rank + 1) * TOKENS])
        expected = torch.zeros(TOKENS, HIDDEN)
        for token, (chosen, factors) in enumerate(zip(inputs.choices, inputs.factors, strict=True)):
            for expert, factor in zip(chosen, factors, strict=True):
                gate, up = (gate_up[expert] @ inputs.hidden[token].float()).chunk(2)
                expected[token] += factor * (down[expert] @ (functional.silu(gate) * up))
        assert (sums.float() - expected).norm() / expected.norm() < 0.08


def test_weights_of_untouched_experts_count_in_no_floor() -> None:
    assert touched(torch.tensor([[0, 3], [3, 9]]), 3, 4) == [2, 0, 1]
    fp8, int4 = (expert_bytes(routed_config(EXPERTS, form)) for form in ("fp8", "w4a8"))
    assert fp8 == 3 * 7168 * 2048 and int4 / fp8 == 0.515625


def _row(ours: float, mega: float | None, error: float | None) -> Row:
    seconds = {OURS: ours, INT4: 3e-4} | ({} if mega is None else {MEGA: mega})
    return Row(2, 64, 8, seconds, {OURS: 2e-4, INT4: 1e-4}, error, None if mega else "nvcc is missing")


def _cells(row: Row) -> list[str]:
    return [str(next(iter(column.cells))) for column in table([row], "GPUs").columns]


def test_a_case_is_its_slowest_ranks_with_the_largest_error() -> None:
    merged_row = merged([[_row(5e-4, 4e-4, 0.03)], [_row(6e-4, 3e-4, 0.2)]])[0]
    expected = ["64", "8", "600.0", "300.0", "400.0", "1.50", "0.75", "200.0", "100.0", "3.00", "3.00", "20.00% WRONG"]
    assert _cells(merged_row) == expected


def test_what_failed_leaves_its_cells_empty() -> None:
    merged_row = merged([[_row(5e-4, None, None)]] * 2)[0]
    assert merged_row.failure == "nvcc is missing"
    assert [_cells(merged_row)[index] for index in (4, 5, 6, 11)] == ["-"] * 4


def test_sums_that_are_no_numbers_are_called_wrong() -> None:
    assert _cells(_row(5e-4, 4e-4, float("nan")))[-1].endswith("WRONG")


def test_another_version_of_deep_gemm_is_refused() -> None:
    package = ModuleType("deep_gemm")
    for name, parameters in INTERFACE.items():
        setattr(package, name, eval(f"lambda {', '.join(parameters)}: None"))
    check_interface(package)
    package.fp8_mega_moe = lambda y, l1_weights, l2_weights: None  # type: ignore[attr-defined]
    del package.transform_weights_for_mega_moe_sm90
    lacking = r"transform_weights_for_mega_moe_sm90|fp8_mega_moe\(sym_buffer\)"
    with pytest.raises(ImportError, match=lacking) as raised:
        check_interface(package)
    assert "pre_dispatch" not in str(raised.value)
