"""INT4 experts of DeepSeek-R1's width, whose weights' scales are over groups of 128 or 32 inputs, as one of eight ranks
holds them, all with the same number of rows; groups of 32 also with weights of -8, as compressed-tensors has them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import EXPERT_LAYERS
from bench.kernels.moe import ROUTED
from bench.kernels.timing import Case
from bench.kernels.w4a8 import even_layout, random_int4
from kernels.w4a8_gemm import ScaledRows, w4a8_grouped_gemm
from kernels.w4a8_gemm.operands import TILE_INPUTS, TILE_OUTPUTS, tile_bytes

ROWS = (16, 32, 64, 96, 128, 1024)
# By provider: the group, and whether weights have -8.
FORMS = {"groups of 128": (128, False), "groups of 32": (32, False), "groups of 32, with -8": (32, True)}


def cases() -> Iterator[Case]:
    for layer, (outputs, inputs) in EXPERT_LAYERS.items():
        for rows in ROWS:
            for provider, (group, minimum) in FORMS.items():
                tiles = outputs * inputs // (TILE_OUTPUTS * TILE_INPUTS)
                yield Case(
                    shape=f"INT4 experts' {layer} {ROUTED}x{outputs}x{inputs}, {rows} rows each",
                    provider=provider,
                    make=partial(_product, rows, outputs, inputs, group, minimum),
                    size_bytes=ROUTED * (tiles * tile_bytes(group) + rows * (inputs + 2 * outputs)),
                    flops=2 * ROUTED * rows * outputs * inputs,
                    fp8=True,
                )


def _product(rows: int, outputs: int, inputs: int, group: int, minimum: bool) -> Callable[[], object]:
    layout, weight = even_layout(rows), random_int4(outputs, inputs, group=group, minimum=minimum)
    values = torch.randn(*layout.shape, inputs, device="cuda").to(torch.float8_e4m3fn)
    x = ScaledRows(values, torch.rand(layout.shape, device="cuda"), static=False)
    return lambda: w4a8_grouped_gemm(x, weight, layout)
