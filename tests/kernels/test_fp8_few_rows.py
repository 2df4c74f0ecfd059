"""Products with few rows: how they are tiled, and on Hopper against their definition."""

import pytest
import torch

from bench.kernels.deepseek_r1 import EXPERT_LAYERS, LINEAR_LAYERS
from bench.kernels.inputs import random_weight
from kernels.act_quant import quantize
from kernels.fp8_gemm import few_rows, reference
from kernels.fp8_gemm.few_rows import ALONE, MOST_UNITS, SHARING, TILINGS, choose_tiling
from kernels.hopper import MOST_CLUSTERS, ClusterTiling
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

# Outputs and inputs of DeepSeek-R1's layers, each with the tiling that is the fastest on an H200.
FASTEST = {
    LINEAR_LAYERS["q_a, kv_a"]: ClusterTiling(outputs=64, ctas=3),
    LINEAR_LAYERS["q_b"]: ClusterTiling(outputs=192, ctas=1),
    LINEAR_LAYERS["o"]: ClusterTiling(outputs=112, ctas=2),
    LINEAR_LAYERS["dense down"]: ClusterTiling(outputs=112, ctas=2),
    EXPERT_LAYERS["gate, up"]: ClusterTiling(outputs=128, ctas=3),
    EXPERT_LAYERS["down"]: ClusterTiling(outputs=128, ctas=2),
}
SHAPES = list(FASTEST)
DENSE = LINEAR_LAYERS["dense gate, up"]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_tiling_is_the_one_measured_to_be_the_fastest(outputs: int, inputs: int) -> None:
    assert choose_tiling(outputs, inputs) == FASTEST[outputs, inputs]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_all_ctas_of_a_product_run_at_once(outputs: int, inputs: int) -> None:
    tiling = choose_tiling(outputs, inputs)
    assert tiling is not None and inputs // 128 <= tiling.ctas * MOST_UNITS
    assert tiling.tiles(outputs) <= MOST_CLUSTERS[tiling.ctas] and 96 <= tiling.tiles(outputs) * tiling.ctas <= 132


def test_weights_of_too_many_tiles_are_tiled_without_clusters() -> None:
    assert choose_tiling(*DENSE) == ALONE and ALONE.tiles(DENSE[0]) > MOST_CLUSTERS[ALONE.ctas]


@pytest.mark.parametrize(("outputs", "inputs"), EXPERT_LAYERS.values())
def test_no_cta_waits_for_others_on_a_shared_chip(outputs: int, inputs: int) -> None:
    assert choose_tiling(outputs, inputs, shares_chip=True) == ALONE


def test_a_small_product_on_a_shared_chip_has_narrow_tiles() -> None:
    # Shared experts' gate and up on one of four ranks.
    assert choose_tiling(1024, 7168, shares_chip=True) == SHARING[0]
    assert choose_tiling(7168, 512, shares_chip=True) == ALONE


def test_inputs_that_no_cluster_has_room_for_have_no_tiling() -> None:
    assert choose_tiling(256, 128 * (max(MOST_CLUSTERS) * MOST_UNITS + 1)) is None


def test_no_more_ctas_share_a_tile_than_it_has_units() -> None:
    assert choose_tiling(192, 384) == ClusterTiling(outputs=64, ctas=3)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 17, 32, 33, 64, 65, 95, 96])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (192, 384), (448, 2944), DENSE, *SHAPES])
def test_rows_are_multiplied_by_the_weight(rows: int, outputs: int, inputs: int) -> None:
    x, weight = quantize(torch.randn(rows, inputs, device="cuda")), random_weight(outputs, inputs)
    assert relative_error(few_rows.fp8_gemm(x, weight), reference.fp8_gemm(x, weight)) < 5e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", [*TILINGS, *SHARING], ids=str)
@pytest.mark.parametrize("rows", [5, 30, 60, 90])
def test_every_tiling_gives_the_same_product(rows: int, tiling: ClusterTiling) -> None:
    x, weight = quantize(torch.randn(rows, 128 * 19, device="cuda")), random_weight(704, 128 * 19)
    assert relative_error(few_rows.fp8_gemm(x, weight, tiling), reference.fp8_gemm(x, weight)) < 5e-3
