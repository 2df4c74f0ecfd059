"""Experts of DeepSeek-R1 as one of eight ranks holds them, with tokens routed uniformly at random.

A rank holds 32 of the 256 experts. On average as many choices reach them as its own tokens make, so here each token
chooses 8 of the 32, and goes to the shared expert too.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from types import ModuleType

import torch

from bench.kernels.deepseek_r1 import CHOICES, EXPERT_LAYERS, EXPERT_WIDTH, HIDDEN, SHARED
from bench.kernels.inputs import random_bfloat16, random_rows, random_weight
from bench.kernels.timing import Case
from kernels.act_quant import GROUP, quantize
from kernels.grouped_gemm import deep_gemm
from kernels.grouped_gemm import triton as ours
from kernels.moe_permute import ExpandedQuantized, MaskedLayout, expand_quantized
from kernels.swiglu import swiglu_quantize

ROUTED = 32
LOCAL_EXPERTS, EXPERTS_PER_TOKEN = ROUTED + SHARED, CHOICES + SHARED
TOKENS = (1, 8, 32, 64, 96, 128, 256, 4096, 16384)
Make = Callable[[], Callable[[], object]]


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield from chain(_products(tokens), _others(tokens))


def random_choice(tokens: int) -> torch.Tensor:
    routed = torch.rand(tokens, ROUTED, device="cuda").argsort(dim=1)[:, :CHOICES]
    return torch.cat([routed, torch.arange(ROUTED, LOCAL_EXPERTS, device="cuda").expand(tokens, SHARED)], dim=1)


def random_expansion(tokens: int, width: int) -> ExpandedQuantized:
    return expand_quantized(random_rows(tokens, width), random_choice(tokens), LOCAL_EXPERTS, SHARED)


def _products(tokens: int) -> Iterator[Case]:
    layout = random_expansion(tokens, GROUP).layout
    providers = {"triton": ours} | ({"deep_gemm": deep_gemm} if deep_gemm.available() else {})
    # A masked layout has counts. With a contiguous one there are far more rows than experts, so that every expert has
    # some.
    touched = int((layout.counts > 0).sum()) if isinstance(layout, MaskedLayout) else LOCAL_EXPERTS
    rows = tokens * EXPERTS_PER_TOKEN
    for layer, (outputs, inputs) in EXPERT_LAYERS.items():
        for name, module in providers.items():
            yield Case(
                shape=f"experts' {layer} {LOCAL_EXPERTS}x{outputs}x{inputs} by {tokens}",
                provider=name,
                make=_product(module, tokens, outputs, inputs),
                size_bytes=touched * outputs * inputs + rows * (inputs + 2 * outputs),
                flops=2 * rows * outputs * inputs,
                fp8=True,
            )


def _product(module: ModuleType, tokens: int, outputs: int, inputs: int) -> Make:
    def make() -> Callable[[], object]:
        weight = random_weight(LOCAL_EXPERTS, outputs, inputs)
        x = random_expansion(tokens, inputs)
        return lambda: module.grouped_fp8_gemm(x.rows, weight, x.layout)

    return make


def _others(tokens: int) -> Iterator[Case]:
    hidden = random_bfloat16(tokens, HIDDEN)
    layout = random_expansion(tokens, GROUP).layout
    inner = random_bfloat16(*layout.shape, 2 * EXPERT_WIDTH)
    rows, scaled = tokens * EXPERTS_PER_TOKEN, 1 + 4 / 128
    timed: dict[str, tuple[Callable[[], object], float]] = {
        "quantize": (lambda: quantize(hidden), tokens * HIDDEN * (2 + scaled)),
        "gate and quantize": (lambda: swiglu_quantize(inner, layout.positions), rows * EXPERT_WIDTH * (4 + scaled)),
    }
    for name, (call, size_bytes) in timed.items():
        yield Case(shape=f"{name} by {tokens}", provider="triton", make=_same(call), size_bytes=size_bytes)


def _same(call: Callable[[], object]) -> Make:
    return lambda: call
