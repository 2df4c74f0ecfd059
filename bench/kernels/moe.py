"""Experts of DeepSeek-R1 as one of eight ranks holds them, tokens routed uniformly at random.

Of 256 experts a rank holds 32, and as many tokens' choices reach them as its own tokens have: the gate is measured over
256, everything else over 32 experts that each token chooses 8 of.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from types import ModuleType

import torch

from bench.kernels.gemm import random_rows, random_weight
from bench.kernels.timing import Case
from kernels.act_quant import quantize
from kernels.grouped_gemm import deep_gemm
from kernels.grouped_gemm import triton as ours
from kernels.moe_gate import reference as plain_gate
from kernels.moe_gate import triton as triton_gate
from kernels.moe_permute import Layout, MaskedLayout, arrange, combine, expand_quantized
from kernels.swiglu import swiglu_quantize

EXPERTS, LOCAL_EXPERTS, CHOICES, HIDDEN, WIDTH = 256, 32, 8, 7168, 2048
# Outputs and inputs.
LAYERS = {"gate, up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
TOKENS = (1, 8, 32, 64, 96, 128, 256, 4096, 16384)
Make = Callable[[], Callable[[], object]]


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield from chain(_products(tokens), _gates(tokens), _others(tokens))


def random_layout(tokens: int) -> Layout:
    choice = torch.rand(tokens, LOCAL_EXPERTS, device="cuda").argsort(dim=1)[:, :CHOICES].contiguous()
    return arrange(choice, LOCAL_EXPERTS)


def _products(tokens: int) -> Iterator[Case]:
    layout = random_layout(tokens)
    providers = {"triton": ours} | ({"deep_gemm": deep_gemm} if deep_gemm.available() else {})
    # A masked layout knows its counts, a contiguous one has far more rows than experts.
    touched = int((layout.counts > 0).sum()) if isinstance(layout, MaskedLayout) else LOCAL_EXPERTS
    rows = tokens * CHOICES
    for layer, (outputs, inputs) in LAYERS.items():
        for name, module in providers.items():
            yield Case(
                shape=f"experts' {layer} {LOCAL_EXPERTS}x{outputs}x{inputs} by {tokens}",
                provider=name,
                make=_product(module, layout, outputs, inputs),
                size_bytes=touched * outputs * inputs + rows * (inputs + 2 * outputs),
                flops=2 * rows * outputs * inputs,
                fp8=True,
            )


def _product(module: ModuleType, layout: Layout, outputs: int, inputs: int) -> Make:
    def make() -> Callable[[], object]:
        weight = random_weight(LOCAL_EXPERTS, outputs, inputs)
        x = expand_quantized(random_rows(len(layout.positions), inputs), layout)
        return lambda: module.grouped_fp8_gemm(x, weight, layout)

    return make


def _gates(tokens: int) -> Iterator[Case]:
    logits, bias = torch.randn(tokens, EXPERTS, device="cuda"), torch.randn(EXPERTS, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "triton": lambda: triton_gate.moe_gate(logits, bias, CHOICES, 8, 4, True, 2.5),
        "torch": lambda: plain_gate.moe_gate(logits, bias, CHOICES, 8, 4, True, 2.5),
    }
    for provider, call in calls.items():
        size_bytes = tokens * (4 * EXPERTS + 12 * CHOICES)
        yield Case(shape=f"choice of {EXPERTS} by {tokens}", provider=provider, make=_same(call), size_bytes=size_bytes)


def _others(tokens: int) -> Iterator[Case]:
    choice = torch.rand(tokens, LOCAL_EXPERTS, device="cuda").argsort(dim=1)[:, :CHOICES].contiguous()
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weights = torch.rand(tokens, CHOICES, device="cuda")
    layout, x = arrange(choice, LOCAL_EXPERTS), quantize(hidden)
    inner = torch.randn(*layout.shape, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    outer = torch.randn(*layout.shape, HIDDEN, dtype=torch.bfloat16, device="cuda")
    rows, scaled = tokens * CHOICES, 1 + 4 / 128
    timed: dict[str, tuple[Callable[[], object], float]] = {
        "arrange": (lambda: arrange(choice, LOCAL_EXPERTS), 16 * rows),
        "quantize": (lambda: quantize(hidden), tokens * HIDDEN * (2 + scaled)),
        "expand": (lambda: expand_quantized(x, layout), (tokens + rows) * HIDDEN * scaled),
        "gate and quantize": (lambda: swiglu_quantize(inner, layout.positions), rows * WIDTH * (4 + scaled)),
        "combine": (lambda: combine(outer, layout.positions, weights, hidden), 2 * (rows + 2 * tokens) * HIDDEN),
    }
    for name, (call, size_bytes) in timed.items():
        yield Case(shape=f"{name} by {tokens}", provider="triton", make=_same(call), size_bytes=size_bytes)


def _same(call: Callable[[], object]) -> Make:
    return lambda: call
