"""INT4 experts on the CPU, by the source that computes both of their products."""

import pytest

from kernels.w4a8_gemm import reference
from kernels.w4a8_gemm.tiling import TILINGS, Tiling
from tests.kernels.test_w4a8_feed_forward import masked, random_feed_forward, random_rows
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error

# Rows of experts. A tile of the last tiling is made as one of 32, 48, 64, 96 or 128 rows.
COUNTS = [1, 0, 33, 47, 64, 90, 128, 200]


@pytest.mark.parametrize(
    ("hidden", "width", "tiling"),
    [*((256, 384, each) for each in TILINGS), *((896, 256, each) for each in (TILINGS[0], TILINGS[-1]))],
    ids=str,
)
def test_experts_compute_their_rows(
    hidden: int, width: int, tiling: Tiling, on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    warpgroups = on_cpu.module("w4a8_gemm.warpgroups")
    # Blocks would wait for each other's rows, and here they run one after another: so there is one.
    monkeypatch.setattr(warpgroups, "processors", lambda *_: 1)
    experts, layout = random_feed_forward(len(COUNTS), hidden, width, "cpu"), masked(COUNTS, 256, "cpu")
    rows = random_rows(layout, len(COUNTS), hidden, "cpu")
    found = warpgroups.w4a8_feed_forward(rows, experts, layout, tiling)
    expected = reference.w4a8_feed_forward(rows, experts, layout)
    for expert, count in enumerate(COUNTS):
        assert not count or relative_error(found[expert, :count], expected[expert, :count]) < 5e-3
