"""Keys and values of DeepSeek-R1's prompts from latents: in bf16, then quantized to e4m3 for attention in FP8."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from bench.kernels.deepseek_r1 import HEADS, LATENT, NOPE, ROPE, VALUE
from bench.kernels.inputs import random_bfloat16, random_rows, random_weight
from bench.kernels.timing import Case
from kernels.fp8_gemm import fp8_gemm, make_workspace
from kernels.mla_prefill import plan_prefill
from kernels.mla_prefill.key_blocks import quantize_blocks

TOKENS = (4096, 17500, 32768, 131072)
OUTPUTS = HEADS * (NOPE + VALUE)


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        shape, flops = f"{OUTPUTS}x{LATENT} by {tokens}", 2.0 * tokens * OUTPUTS * LATENT
        plain, blocks = 2.0 * tokens * OUTPUTS, float(tokens * HEADS * (NOPE + ROPE + VALUE))
        yield Case(shape, "torch, bf16", partial(_plain, tokens), plain, flops)
        yield Case(shape, "deepmesh", partial(_product, tokens), plain, flops, fp8=True)
        yield Case(f"{shape}, blocks in e4m3", "deepmesh", partial(_blocks, tokens), blocks, flops, fp8=True)


def _plain(tokens: int) -> Callable[[], object]:
    latents, weight = random_bfloat16(tokens, LATENT), random_bfloat16(OUTPUTS, LATENT)
    return lambda: functional.linear(latents, weight)


def _product(tokens: int) -> Callable[[], torch.Tensor]:
    latents, weight = random_rows(tokens, LATENT), random_weight(OUTPUTS, LATENT)
    workspace = make_workspace(torch.device("cuda"))
    return lambda: fp8_gemm(latents, weight, workspace)


def _blocks(tokens: int) -> Callable[[], object]:
    expand, shared = _product(tokens), random_bfloat16(tokens, ROPE)
    plan = plan_prefill([tokens], [tokens], torch.device("cuda"), quantized=True)

    def call() -> object:
        own, value = expand().unflatten(1, (HEADS, NOPE + VALUE)).split([NOPE, VALUE], dim=2)
        return quantize_blocks(own, shared, value, plan)

    return call
