"""Linear layers for a few rows, against their definition; without a GPU in Triton's interpreter."""

import pytest
import torch

from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

few_rows = pytest.importorskip("kernels.linear.few_rows")

pytestmark = pytest.mark.usefixtures("poisoned")


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def assert_multiplied(x: torch.Tensor, weight: torch.Tensor) -> None:
    found, expected = few_rows.multiply_groups(x, weight), torch.einsum("rgi,goi->rgo", x.double(), weight.double())
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    assert relative_error(found, expected) < 3e-3


# Widths that do and do not fill a program's tile, and outputs that do not fill the last one.
@pytest.mark.parametrize(("outputs", "inputs"), [(129, 256), (40, 200), (3, 9000)])
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_are_multiplied_by_their_groups_weights(
    rows: int, outputs: int, inputs: int, device: torch.device
) -> None:
    # Slices of wider matrices: neither rows nor weights of a group are next to each other.
    x, weight = random(rows, 3, inputs, device=device)[:, 1:], random(2, outputs + 8, inputs, device=device)[:, 8:]
    assert_multiplied(x, weight)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
# Moonlight's attention input and output, GLM-4.7-Flash's queries, output and values, and a dense layer.
@pytest.mark.parametrize(
    ("groups", "outputs", "inputs"),
    [(1, 3648, 2048), (1, 2048, 2048), (1, 5120, 768), (1, 2048, 5120), (20, 256, 512), (1, 2048, 11264)],
)
def test_published_layers_are_multiplied(rows: int, groups: int, outputs: int, inputs: int) -> None:
    device = torch.device("cuda")
    assert_multiplied(random(rows, groups, inputs, device=device), random(groups, outputs, inputs, device=device))
