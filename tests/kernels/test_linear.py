import pytest
import torch

from kernels.linear import linear, reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

triton_linear = pytest.importorskip("kernels.linear.triton")


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [0, 1, 17, 40, triton_linear.MOST_ROWS])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 512), (200, 136)])
def test_few_rows_are_multiplied_by_the_weight(rows: int, outputs: int, inputs: int, device: torch.device) -> None:
    x, weight = random(rows, inputs, device=device), random(outputs, inputs, device=device)
    expected = x.double() @ weight.double().t()
    for found in (triton_linear.linear(x, weight), linear(x, weight)):
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        assert relative_error(found, expected) < 3e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, triton_linear.MOST_ROWS, triton_linear.MOST_ROWS + 1])
def test_only_few_rows_by_a_large_weight_are_taken(rows: int, device: torch.device) -> None:
    outputs = triton_linear.FEWEST_OUTPUTS
    x, weight = random(rows, 1024, device=device), random(outputs + 8, 1024, device=device)
    assert triton_linear.takes(x, weight) == (rows <= triton_linear.MOST_ROWS)
    assert not triton_linear.takes(x, weight[: outputs - 8])
    assert not triton_linear.takes(x.float(), weight.float())
    assert relative_error(linear(x, weight), reference.linear(x, weight)) < 1e-3
