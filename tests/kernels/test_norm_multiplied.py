"""Residual, norm and a product of one row in one kernel on a GPU, and a product alone, against their definitions."""

import pytest
import torch

from kernels.fp8_gemm import block_scaled
from kernels.moe_permute import NOWHERE, ExpertOutputs, combine
from kernels.norm import Matrix, reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

multiplied = pytest.importorskip("kernels.norm.multiplied")
row_products = pytest.importorskip("kernels.linear.row_products")

EPSILON = 1e-5
pytestmark = pytest.mark.usefixtures("poisoned")

FORMATS = pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp8"])


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


def random_matrix(outputs: int, inputs: int, device: torch.device, *, scaled: bool) -> Matrix:
    if not scaled:
        return random(outputs, inputs, device=device)
    values = torch.randn(outputs, inputs, device=device).mul(50).to(torch.float8_e4m3fn)
    return block_scaled(values, torch.rand(-(-outputs // 128), inputs // 128, device=device) + 0.1)


def plain(matrix: Matrix) -> torch.Tensor:
    """[outputs, inputs] float64."""
    if isinstance(matrix, torch.Tensor):
        return matrix.double()
    scales = matrix.scales.repeat_interleave(128, 0)[: len(matrix.values)].repeat_interleave(128, 1)
    return matrix.values.double() * scales.double()


def some_outputs(places: int, width: int, device: torch.device) -> ExpertOutputs:
    """Rows in any order; the first choice has none, and its row was not written."""
    rows, positions = random(places, width, device=device), torch.randperm(places, device=device).unsqueeze(0)
    rows[positions[0, 0]] = float("nan")
    positions[0, 0] = NOWHERE
    return ExpertOutputs(rows, positions, torch.rand(1, places, device=device))


def assert_as_defined(
    delta: torch.Tensor | ExpertOutputs, outputs: int, width: int, device: torch.device, *, scaled: bool
) -> None:
    residual, weight = random(1, width, device=device), random(width, device=device)
    matrix = random_matrix(outputs, width, device, scaled=scaled)
    expected, normalized = residual.clone(), torch.empty_like(residual)
    change = combine(delta) if isinstance(delta, ExpertOutputs) else delta
    reference.add_rms_norm(change, expected, weight, EPSILON, normalized, None)
    added, product = multiplied.add_rms_norm_and_multiply(delta, residual, weight, EPSILON, matrix)
    assert relative_error(added, expected) < 2e-3
    assert relative_error(product, normalized.double() @ plain(matrix).t()) < 5e-3


def assert_normalized(outputs: int, width: int, device: torch.device, *, scaled: bool) -> None:
    x, weight = random(1, 2 * width, device=device)[:, :width], random(width, device=device)
    matrix = random_matrix(outputs, width, device, scaled=scaled)
    normalized = torch.empty(1, width, device=device).bfloat16()
    reference.add_rms_norm(x, torch.zeros_like(normalized), weight, EPSILON, normalized, None)
    found = multiplied.rms_norm_and_multiply(x, weight, EPSILON, matrix)
    assert relative_error(found, normalized.double() @ plain(matrix).t()) < 5e-3


@pytest.mark.gpu
@on_hopper
@FORMATS
# The first products of Moonlight's and GLM-4.7-Flash's attention.
@pytest.mark.parametrize(("places", "outputs"), [(8, 3648), (5, 1344)])
def test_published_rows_are_multiplied(places: int, outputs: int, scaled: bool) -> None:
    device = torch.device("cuda")
    assert_as_defined(some_outputs(places, 2048, device), outputs, 2048, device, scaled=scaled)
    assert_as_defined(random(1, 2048, device=device), outputs, 2048, device, scaled=scaled)
    assert_normalized(5120, 768, device, scaled=scaled)


@pytest.mark.gpu
@on_hopper
@FORMATS
@pytest.mark.parametrize(("outputs", "inputs"), [(2048, 2048), (2048, 5120), (22528, 2048), (72, 384)])
def test_a_row_is_multiplied_as_it_is(outputs: int, inputs: int, scaled: bool) -> None:
    device = torch.device("cuda")
    x, matrix = random(1, inputs, device=device), random_matrix(outputs, inputs, device, scaled=scaled)
    assert relative_error(row_products.multiply(x, matrix), x.double() @ plain(matrix).t()) < 5e-3
