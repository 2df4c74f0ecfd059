"""Residual, norm and a product of one row in one kernel, against their definitions, perhaps in the interpreter."""

import pytest
import torch

from kernels.moe_permute import NOWHERE, ExpertOutputs, combine
from kernels.norm import reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

multiplied = pytest.importorskip("kernels.norm.multiplied")

EPSILON = 1e-5
pytestmark = pytest.mark.usefixtures("poisoned")


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


def some_outputs(places: int, width: int, device: torch.device) -> ExpertOutputs:
    """Rows in any order; the first choice has none, and its row was not written."""
    rows, positions = random(places, width, device=device), torch.randperm(places, device=device).unsqueeze(0)
    rows[positions[0, 0]] = float("nan")
    positions[0, 0] = NOWHERE
    return ExpertOutputs(rows, positions, torch.rand(1, places, device=device))


def assert_as_defined(delta: torch.Tensor | ExpertOutputs, outputs: int, width: int, device: torch.device) -> None:
    residual, weight = random(1, width, device=device), random(width, device=device)
    matrix = random(outputs, width, device=device)
    expected, plain = residual.clone(), torch.empty_like(residual)
    change = combine(delta) if isinstance(delta, ExpertOutputs) else delta
    reference.add_rms_norm(change, expected, weight, EPSILON, plain, None)
    added, product = multiplied.add_rms_norm_and_multiply(delta, residual, weight, EPSILON, matrix)
    assert relative_error(added, expected) < 2e-3
    assert relative_error(product, plain.double() @ matrix.double().t()) < 5e-3


# Neither widths nor outputs are powers of two.
def test_a_row_is_added_normalized_and_multiplied(device: torch.device) -> None:
    assert_as_defined(random(1, 384, device=device), 200, 384, device)


def test_what_experts_made_is_added_up_before(device: torch.device) -> None:
    assert_as_defined(some_outputs(5, 384, device), 200, 384, device)


def assert_normalized(outputs: int, width: int, device: torch.device) -> None:
    x, weight = random(1, 2 * width, device=device)[:, :width], random(width, device=device)
    matrix, plain = random(outputs, width, device=device), torch.empty(1, width, device=device).bfloat16()
    reference.add_rms_norm(x, torch.zeros_like(plain), weight, EPSILON, plain, None)
    found = multiplied.rms_norm_and_multiply(x, weight, EPSILON, matrix)
    assert relative_error(found, plain.double() @ matrix.double().t()) < 5e-3


def test_a_row_is_normalized_and_multiplied_without_a_residual(device: torch.device) -> None:
    assert_normalized(200, 384, device)


@pytest.mark.gpu
@on_hopper
# The first products of Moonlight's and GLM-4.7-Flash's attention.
@pytest.mark.parametrize(("places", "outputs"), [(8, 3648), (5, 1344)])
def test_published_rows_are_multiplied(places: int, outputs: int) -> None:
    device = torch.device("cuda")
    assert_as_defined(some_outputs(places, 2048, device), outputs, 2048, device)
    assert_as_defined(random(1, 2048, device=device), outputs, 2048, device)
    assert_normalized(5120, 768, device)
