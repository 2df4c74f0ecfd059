"""NVFP4 experts of DeepSeek-R1 as one of eight ranks holds them, each with as many rows: beside bfloat16's of torch.

The floor is that of the NVFP4 weights' bytes and of bfloat16 products for both.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import EXPERT_LAYERS
from bench.kernels.inputs import random_bfloat16
from bench.kernels.moe import ROUTED
from bench.kernels.timing import Case
from kernels.grouped_gemm import grouped_gemm
from kernels.nvfp4_gemm import Nvfp4, nvfp4, nvfp4_grouped_gemm
from kernels.nvfp4_quant import GROUP

ROWS = (1, 16, 32, 64, 128, 512)
Call = Callable[[], object]


def cases() -> Iterator[Case]:
    for layer, (outputs, inputs) in EXPERT_LAYERS.items():
        for rows in ROWS:
            for provider, make in (("deepmesh", _nvfp4), ("torch, bf16", _bf16)):
                yield Case(
                    shape=f"NVFP4 experts' {layer} {ROUTED}x{outputs}x{inputs}, {rows} rows each",
                    provider=provider,
                    make=partial(make, rows, outputs, inputs),
                    size_bytes=ROUTED * (outputs * inputs * (1 / 2 + 1 / GROUP) + 2 * rows * (inputs + outputs)),
                    flops=2 * ROUTED * rows * outputs * inputs,
                )


def _nvfp4(rows: int, outputs: int, inputs: int) -> Call:
    x, ends, weight = random_bfloat16(ROUTED * rows, inputs), _ends(rows), random_nvfp4(outputs, inputs)
    return lambda: nvfp4_grouped_gemm(x, weight, ends)


def _bf16(rows: int, outputs: int, inputs: int) -> Call:
    x, ends, weight = random_bfloat16(ROUTED * rows, inputs), _ends(rows), random_bfloat16(ROUTED, outputs, inputs)
    return lambda: grouped_gemm(x, weight, ends)


def _ends(rows: int) -> torch.Tensor:
    return torch.arange(rows, rows * (ROUTED + 1), rows, dtype=torch.int32, device="cuda")


def random_nvfp4(outputs: int, inputs: int) -> Nvfp4:
    codes = torch.randint(256, (ROUTED, outputs, inputs // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(ROUTED, outputs, inputs // GROUP, device="cuda").to(torch.float8_e4m3fn)
    return nvfp4(codes, scales, torch.ones(ROUTED, 1, device="cuda"))
