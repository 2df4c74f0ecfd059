"""Products with few rows: how they are cut, and on Hopper against their definition."""

import pytest
import torch

from bench.kernels.deepseek_r1 import EXPERT_LAYERS, LINEAR_LAYERS
from bench.kernels.inputs import random_weight
from kernels.act_quant import quantize
from kernels.fp8_gemm import few_rows, reference
from kernels.fp8_gemm.few_rows import CUTS, MOST_CLUSTERS, MOST_UNITS, Cut, choose_cut
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

# Outputs and inputs of DeepSeek-R1's layers, each with the cut that is the fastest on an H200.
FASTEST = {
    LINEAR_LAYERS["q_a, kv_a"]: Cut(outputs=64, ranks=3),
    LINEAR_LAYERS["q_b"]: Cut(outputs=192, ranks=1),
    LINEAR_LAYERS["o"]: Cut(outputs=112, ranks=2),
    LINEAR_LAYERS["dense down"]: Cut(outputs=112, ranks=2),
    EXPERT_LAYERS["gate, up"]: Cut(outputs=128, ranks=3),
    EXPERT_LAYERS["down"]: Cut(outputs=128, ranks=2),
}
SHAPES = list(FASTEST)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_cut_as_measured_to_be_the_fastest(outputs: int, inputs: int) -> None:
    assert choose_cut(outputs, inputs) == FASTEST[outputs, inputs]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_all_of_a_product_runs_at_once(outputs: int, inputs: int) -> None:
    cut = choose_cut(outputs, inputs)
    assert cut is not None and inputs // 128 <= cut.ranks * MOST_UNITS
    assert cut.tiles(outputs) <= MOST_CLUSTERS[cut.ranks] and 96 <= cut.tiles(outputs) * cut.ranks <= 132


@pytest.mark.parametrize(
    ("outputs", "inputs"), [LINEAR_LAYERS["dense gate, up"], (256, 128 * (max(MOST_CLUSTERS) * MOST_UNITS + 1))]
)
def test_weights_that_need_more_than_the_chip_are_left_to_others(outputs: int, inputs: int) -> None:
    assert choose_cut(outputs, inputs) is None


def test_no_more_share_a_tile_than_there_are_inputs_to_share() -> None:
    assert choose_cut(192, 384) == Cut(outputs=64, ranks=3)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 17, 32, 33, 64, 65, 95, 96])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (192, 384), (448, 2944), *SHAPES])
def test_a_linear_layer(rows: int, outputs: int, inputs: int) -> None:
    x, weight = quantize(torch.randn(rows, inputs, device="cuda")), random_weight(outputs, inputs)
    assert relative_error(few_rows.fp8_gemm(x, weight), reference.fp8_gemm(x, weight)) < 5e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("rows", [5, 30, 60, 90])
def test_every_cut_gives_the_same_product(rows: int, cut: Cut) -> None:
    x, weight = quantize(torch.randn(rows, 128 * 19, device="cuda")), random_weight(704, 128 * 19)
    assert relative_error(few_rows.fp8_gemm(x, weight, cut), reference.fp8_gemm(x, weight)) < 5e-3
