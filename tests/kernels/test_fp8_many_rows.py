"""Products of many rows on Hopper against their definition."""

import pytest
import torch

from bench.kernels.deepseek_r1 import EXPERT_LAYERS, LINEAR_LAYERS
from bench.kernels.inputs import random_weight
from kernels.act_quant import quantize
from kernels.fp8_gemm import many_rows, reference
from kernels.grouped_gemm import reference as grouped_reference
from kernels.moe_permute import expand_contiguous
from kernels.moe_permute.layout import ContiguousLayout
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

SHAPES = [(64, 128), (128, 256), (192, 384), (448, 2944), *LINEAR_LAYERS.values()]
# The fastest on an H200.
FASTEST = [
    (128, "o", 64),
    (256, "o", 128),
    (512, "o", 256),
    (192, "q_b", 128),
    (384, "q_a, kv_a", 64),
    (8192, "q_b", 256),
    (8192, "o", 256),
]


@pytest.mark.parametrize(("rows", "layer", "width"), FASTEST)
def test_the_fastest_measured_width_of_tiles_is_chosen(rows: int, layer: str, width: int) -> None:
    assert many_rows.choose_width(rows, LINEAR_LAYERS[layer][0], 132) == width


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("width", many_rows.BLOCK_TIMES)
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 128, 129, 700, 2500])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_multiplied_by_the_weight(rows: int, outputs: int, inputs: int, width: int) -> None:
    x, weight = quantize(torch.randn(rows, inputs, device="cuda")), random_weight(outputs, inputs)
    assert relative_error(many_rows.fp8_gemm(x, weight, width), reference.fp8_gemm(x, weight)) < 5e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [0, 1, 70, 300, 3000])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (256, 384), EXPERT_LAYERS["down"]])
def test_rows_are_multiplied_by_their_experts_weights(tokens: int, outputs: int, inputs: int) -> None:
    # Half of the tokens share one expert, and the fourth has none.
    chosen = torch.randint(1, 6, (tokens, 2), device="cuda")
    chosen[::2, 0] = 0
    chosen[chosen == 3] = 4
    weight = random_weight(6, outputs, inputs)
    x = expand_contiguous(quantize(torch.randn(tokens, inputs, device="cuda")), chosen, 6)
    assert isinstance(x.layout, ContiguousLayout)
    used = x.positions.flatten()
    found = many_rows.sorted_fp8_gemm(x.rows, weight, x.layout.row_experts)[used]
    expected = grouped_reference.grouped_fp8_gemm(x.rows, weight, x.layout)[used]
    assert relative_error(found, expected) < 5e-3


@pytest.mark.gpu
@on_hopper
def test_a_product_is_the_same_each_time() -> None:
    x, weight = quantize(torch.randn(3000, 2048, device="cuda")), random_weight(1536, 2048)
    first = many_rows.fp8_gemm(x, weight)
    assert all(torch.equal(many_rows.fp8_gemm(x, weight), first) for _ in range(200))
