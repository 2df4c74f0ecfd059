"""The INT4 experts' products on the CPU, with both sizes of groups."""

import pytest
import torch

from kernels.moe_permute.layout import PADDING, ContiguousLayout, Layout, MaskedLayout
from kernels.w4a8_gemm import Int4Experts, ScaledRows, int4_experts, pack_tiles, reference
from kernels.w4a8_gemm.tiling import NARROW, TILINGS, Tiling
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error

E4M3 = torch.float8_e4m3fn
# Only bfloat16's rounding of the outputs.
ERROR = 4e-3


def random_experts(experts: int, outputs: int, inputs: int, group: int, lowest: int) -> Int4Experts:
    integers = torch.randint(lowest, 8, (experts, outputs, inputs), dtype=torch.int8)
    packed = (integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)
    return int4_experts(pack_tiles(packed, torch.rand(experts, outputs, inputs // group) + 0.1))


def random_rows(layout: Layout, inputs: int) -> ScaledRows:
    values = torch.randn(*layout.shape, inputs).to(E4M3)
    return ScaledRows(values, torch.rand(layout.shape) + 0.1, static=False)


# The size of groups changes the same code in each tiling. Of 32: the one that divides inputs, and the largest.
@pytest.mark.parametrize(
    ("group", "tiling"), [(32, NARROW), (32, TILINGS[-1]), *((128, each) for each in (NARROW, *TILINGS))], ids=str
)
def test_rows_are_multiplied_as_defined(group: int, tiling: Tiling, on_cpu: CudaOnCpu) -> None:
    # Tiles are made as ones of as many eights of rows as they have, from 64 on as many times 32.
    counts = [0, 7, 43, 14] if tiling.rows < 128 else [39, 20, 175, 96]
    layout = MaskedLayout(torch.zeros(1, 1), torch.tensor(counts, dtype=torch.int32), 256)
    weight, x = random_experts(4, 320, 512, group, -7), random_rows(layout, 512)
    found = on_cpu.module("w4a8_gemm.warpgroups").w4a8_grouped_gemm(x, weight, layout, tiling)
    expected = reference.w4a8_grouped_gemm(x, weight, layout)
    for expert, count in enumerate(counts):
        assert not count or relative_error(found[expert, :count], expected[expert, :count]) < ERROR


@pytest.mark.parametrize("group", [32, 128])
def test_contiguous_rows_meet_weights_of_minus_eight(group: int, on_cpu: CudaOnCpu) -> None:
    row_experts = torch.tensor([0, 2, PADDING]).repeat_interleave(128).int()
    row_experts[100:128] = PADDING
    layout = ContiguousLayout(torch.zeros(1, 1, dtype=torch.int64), row_experts)
    weight, x = random_experts(3, 64, 256, group, -8), random_rows(layout, 256)
    found = on_cpu.module("w4a8_gemm.warpgroups").w4a8_grouped_gemm(x, weight, layout)
    expected, used = reference.w4a8_grouped_gemm(x, weight, layout), row_experts >= 0
    assert weight.has_minimum and relative_error(found[used], expected[used]) < ERROR


def test_sums_that_are_read_too_early_are_noticed(on_cpu: CudaOnCpu) -> None:
    warpgroups = on_cpu.module("w4a8_gemm.warpgroups")
    right = "wait_for_products(min(unit, UNITS - 1) - added);"
    on_cpu.make_mistake(warpgroups.SOURCES[32], right, right.replace("added", "added + 1"))
    layout = MaskedLayout(torch.zeros(1, 1), torch.tensor([128], dtype=torch.int32), 128)
    weight, x = random_experts(1, 256, 256, 32, -7), random_rows(layout, 256)
    found = warpgroups.w4a8_grouped_gemm(x, weight, layout, TILINGS[-1])
    assert not relative_error(found, reference.w4a8_grouped_gemm(x, weight, layout)) < 10 * ERROR
