"""Linear layers of one long row on a GPU, against their definition, also in a captured chain."""

import pytest
import torch

from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

one_row = pytest.importorskip("kernels.linear.one_row")

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.gpu, on_hopper]


@pytest.mark.parametrize("outputs", [8, 2048, 2112])
def test_one_row_is_multiplied_by_the_weight(outputs: int) -> None:
    x, weight = (torch.randn(rows, 5120, device="cuda").bfloat16() for rows in (1, outputs))
    assert one_row.takes(x, weight)
    assert relative_error(one_row.linear(x, weight), x.double() @ weight.double().t()) < 3e-3


def test_a_captured_product_reads_what_the_kernel_before_wrote() -> None:
    x, weight = (torch.randn(rows, 5120, device="cuda").bfloat16() for rows in (1, 5120 // 8 * 3))
    weight = torch.cat([weight] * 2)[:2048]
    source = x.clone()
    one_row.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(source, 2, out=x)
        first = one_row.linear(x, weight)
        second = one_row.linear(torch.nn.functional.pad(first, (0, 3072)), weight)
    for factor in range(1, 4):
        source.copy_(torch.randn_like(source) * factor)
        graph.replay()
        expected = (source.double() * 2) @ weight.double().t()
        assert relative_error(first, expected) < 3e-3
        assert relative_error(second, torch.nn.functional.pad(first.double(), (0, 3072)) @ weight.double().t()) < 3e-3
