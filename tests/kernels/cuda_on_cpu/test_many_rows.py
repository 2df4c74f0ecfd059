"""Experts' products of many rows in bfloat16 on the CPU."""

import pytest
import torch

from kernels.grouped_gemm import reference
from kernels.swiglu.reference import swiglu
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("sizes", "inputs", "outputs"),
    [([3, 0, 300], 136, 144), ([0, 65, 190, 256, 2], 64, 272), ([*range(15, 256, 16)], 64, 16)],
    ids=["a tile and its rest", "several tiles of outputs", "tiles of each number of rows"],
)
def test_rows_are_multiplied_by_their_experts(
    gated: bool, sizes: list[int], inputs: int, outputs: int, on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_rows = on_cpu.module("grouped_gemm.many_rows")
    # Two clusters of two CTAs, and a multiprocessor without a CTA.
    monkeypatch.setattr(many_rows, "processors", lambda device: 5)
    x, weights = torch.randn(sum(sizes), inputs).bfloat16(), torch.randn(len(sizes), outputs, inputs).bfloat16() / 8
    ends = torch.tensor(sizes).cumsum(0).int()
    assert many_rows.takes(x, weights)
    product = reference.all_groups_gemm(x.float(), weights.float(), ends)
    for tile_rows in many_rows.TILE_ROWS:
        found = many_rows.grouped_gemm(x, weights, ends, gated=gated, tile_rows=tile_rows)
        assert relative_error(found, swiglu(product) if gated else product) < 4e-3
