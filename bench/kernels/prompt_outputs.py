"""Prompt attention that quantizes its outputs, and attention and quantization in two kernels, for DeepSeek-R1."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import HEADS, LATENT, NOPE, ROPE, VALUE
from bench.kernels.inputs import random_bfloat16
from bench.kernels.timing import Case
from kernels.act_quant import empty_quantized, quantize_into
from kernels.mla_prefill import attend_and_quantize, mla_prefill, plan_prefill

SCALE = (NOPE + ROPE) ** -0.5
LENGTHS = [3500] * 4


def cases() -> Iterator[Case]:
    flops = 2.0 * sum(length * (length + 1) // 2 for length in LENGTHS) * HEADS * (NOPE + ROPE + VALUE)
    size_bytes = float(sum(LENGTHS) * HEADS * (2 * (NOPE + ROPE + NOPE + VALUE) + VALUE))
    for name, fp8 in (("bf16", False), ("FP8", True)):
        for provider, fused in (("deepmesh, two kernels", False), ("deepmesh", True)):
            shape = f"prefill {len(LENGTHS)} x {LENGTHS[0]}, {name}, outputs quantized"
            yield Case(shape, provider, partial(_attention, fp8, fused), size_bytes, flops, fp8)


def _attention(fp8: bool, fused: bool) -> Callable[[], object]:
    tokens, device = sum(LENGTHS), torch.device("cuda")
    plan = plan_prefill(LENGTHS, LENGTHS, device, quantized=fp8)
    query, shared = random_bfloat16(tokens, HEADS, NOPE + ROPE), random_bfloat16(tokens, LATENT + ROPE)[:, LATENT:]
    own, value = random_bfloat16(tokens, HEADS, NOPE + VALUE).split([NOPE, VALUE], dim=2)
    out = empty_quantized(tokens, HEADS * VALUE, device=device).rows(0, tokens)
    if fused:
        return lambda: attend_and_quantize(query, own, shared, value, plan, out, scale=SCALE)
    values = random_bfloat16(tokens, HEADS, VALUE)

    def call() -> None:
        mla_prefill(query, own, shared, value, plan, values, scale=SCALE)
        quantize_into(values.flatten(1), out)

    return call
