"""Linear layers of few tokens by clusters, on the CPU."""

import pytest
import torch

from kernels.hopper import ClusterTiling
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "tile", "ctas"),
    [(2, 72, 128, 64, 1), (30, 136, 640, 128, 3), (64, 136, 1216, 128, 2), (50, 64, 512, 64, 8)],
)
def test_rows_are_multiplied_by_the_weight(
    tokens: int, outputs: int, inputs: int, tile: int, ctas: int, on_cpu: CudaOnCpu
) -> None:
    clusters = on_cpu.module("linear.clusters")
    x, weight = torch.randn(tokens, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    found = clusters.linear(x, weight, ClusterTiling(tile, ctas))
    assert relative_error(found.float(), x.float() @ weight.float().t()) < 4e-3
