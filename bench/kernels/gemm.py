"""FP8 linear layers of DeepSeek-R1: our kernels in CUDA for few rows and for many, and in Triton, and deep_gemm."""

from collections.abc import Callable, Iterator

import torch

from bench.kernels.deepseek_r1 import LINEAR_LAYERS
from bench.kernels.inputs import random_rows, random_weight
from bench.kernels.timing import Case
from kernels.act_quant import Quantized
from kernels.fp8_gemm import BlockScaled, deep_gemm, few_rows, make_workspace, many_rows
from kernels.fp8_gemm import triton as ours

Product = Callable[[Quantized, BlockScaled], torch.Tensor]
TOKENS = (1, 8, 32, 64, 96, 128, 192, 256, 384, 4096, 16384)


def cases() -> Iterator[Case]:
    for layer, (outputs, inputs) in LINEAR_LAYERS.items():
        for tokens in TOKENS:
            for name, product in _providers(tokens, outputs, inputs).items():
                yield Case(
                    shape=f"{layer} {outputs}x{inputs} by {tokens}",
                    provider=name,
                    make=_linear(product, tokens, outputs, inputs),
                    size_bytes=outputs * inputs + tokens * (inputs + 2 * outputs),
                    flops=2 * tokens * outputs * inputs,
                    fp8=True,
                )


def _providers(tokens: int, outputs: int, inputs: int) -> dict[str, Product]:
    workspace = make_workspace(torch.device("cuda"))
    found: dict[str, Product] = {"triton": lambda x, weight: ours.fp8_gemm(x, weight, workspace)}
    if few_rows.takes(tokens, outputs, inputs):
        found["few rows"] = few_rows.fp8_gemm
    if many_rows.takes(tokens, outputs):
        found["many rows"] = many_rows.fp8_gemm
    if deep_gemm.available():
        found["deep_gemm"] = deep_gemm.fp8_gemm
    return found


def _linear(product: Product, tokens: int, outputs: int, inputs: int) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        x, weight = random_rows(tokens, inputs), random_weight(outputs, inputs)
        return lambda: product(x, weight)

    return make
