"""A linear layer of one long row on the CPU."""

import torch

from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error


def test_one_row_is_multiplied_by_the_weight(on_cpu: CudaOnCpu) -> None:
    one_row = on_cpu.module("linear.one_row")
    x, weight = torch.randn(1, 5120).bfloat16(), torch.randn(24, 5120).bfloat16()
    assert one_row.takes(x, weight)
    assert relative_error(one_row.linear(x, weight).float(), x.float() @ weight.float().t()) < 4e-3
