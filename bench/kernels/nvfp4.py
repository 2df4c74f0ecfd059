"""NVFP4 experts of DeepSeek-R1 as one of eight ranks holds them, all with the same number of rows, and attention's
output projection, and torch in bfloat16.

The floor of both is that of the NVFP4 weights' bytes and of bfloat16 products.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from bench.kernels.deepseek_r1 import EXPERT_LAYERS, LINEAR_LAYERS
from bench.kernels.inputs import random_bfloat16
from bench.kernels.moe import ROUTED
from bench.kernels.timing import Case
from kernels.grouped_gemm import grouped_gemm
from kernels.nvfp4_gemm import Nvfp4, arranged, nvfp4, nvfp4_grouped_gemm
from kernels.nvfp4_quant import GROUP

ROWS = (1, 16, 32, 64, 128, 512, 2048)
Call = Callable[[], object]


def cases() -> Iterator[Case]:
    for layer, (outputs, inputs) in EXPERT_LAYERS.items():
        yield from _cases(f"NVFP4 experts' {layer}", ROUTED, outputs, inputs)
    yield from _cases("NVFP4 o", 1, *LINEAR_LAYERS["o"])


def _cases(layer: str, experts: int, outputs: int, inputs: int) -> Iterator[Case]:
    for rows in ROWS:
        for provider, make in (("deepmesh", _nvfp4), ("torch, bf16", _bf16)):
            yield Case(
                shape=f"{layer} {experts}x{outputs}x{inputs}, {rows} rows each",
                provider=provider,
                make=partial(make, experts, rows, outputs, inputs),
                size_bytes=experts * (outputs * inputs * (1 / 2 + 1 / GROUP) + 2 * rows * (inputs + outputs)),
                flops=2 * experts * rows * outputs * inputs,
            )


def _nvfp4(experts: int, rows: int, outputs: int, inputs: int) -> Call:
    x, weight, ends = (
        random_bfloat16(experts * rows, inputs),
        random_nvfp4(experts, outputs, inputs),
        _ends(experts, rows),
    )
    return lambda: nvfp4_grouped_gemm(x, weight, ends)


def _bf16(experts: int, rows: int, outputs: int, inputs: int) -> Call:
    x, weight = random_bfloat16(experts * rows, inputs), random_bfloat16(experts, outputs, inputs)
    if experts == 1:
        return lambda: functional.linear(x, weight[0])
    ends = _ends(experts, rows)
    return lambda: grouped_gemm(x, weight, ends)


def _ends(experts: int, rows: int) -> torch.Tensor:
    return torch.arange(rows, rows * (experts + 1), rows, dtype=torch.int32, device="cuda")


def random_nvfp4(experts: int, outputs: int, inputs: int) -> Nvfp4:
    codes = torch.randint(256, (experts, outputs, inputs // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(experts, outputs, inputs // GROUP, device="cuda").to(torch.float8_e4m3fn)
    return arranged(nvfp4(codes, scales, torch.ones(experts, 1, device="cuda")))
