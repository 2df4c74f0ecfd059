"""The products around absorbed attention of DeepSeek-R1: our kernels, and cuBLAS with the kernels it needs."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import HEADS, LATENT, NOPE, ROPE, VALUE
from bench.kernels.inputs import random_bfloat16, random_rotations
from bench.kernels.timing import Case
from kernels.act_quant import empty_quantized, quantize
from kernels.mla_projections import few_tokens as ours
from kernels.mla_projections import reference

TOKENS = (1, 8, 32, 64, 96, 128, 256, 512)
Call = Callable[[], object]


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        for provider, absorb in (("deepmesh", ours.absorb_query), ("cuBLAS", reference.absorb_query)):
            yield Case(
                shape=f"queries absorbed by {tokens}",
                provider=provider,
                make=partial(_absorb_call, absorb, tokens),
                size_bytes=2.0 * HEADS * (NOPE * LATENT + tokens * (NOPE + ROPE + LATENT + ROPE)),
                flops=2.0 * tokens * HEADS * NOPE * LATENT,
            )
        for provider, expand in (("deepmesh", _expand_quantized), ("cuBLAS", _expand_and_quantize)):
            yield Case(
                shape=f"values expanded and quantized by {tokens}",
                provider=provider,
                make=partial(_expand_call, expand, tokens),
                size_bytes=HEADS * (2.0 * VALUE * LATENT + tokens * (2 * LATENT + VALUE)),
                flops=2.0 * tokens * HEADS * VALUE * LATENT,
            )


def _expand_quantized(attended: torch.Tensor, weight: torch.Tensor) -> None:
    out = empty_quantized(len(attended), HEADS * VALUE, device=attended.device)
    ours.expand_values_into(attended, weight, out.rows(0, len(attended)))


def _expand_and_quantize(attended: torch.Tensor, weight: torch.Tensor) -> object:
    return quantize(reference.expand_values(attended, weight).flatten(1))


def _weight() -> torch.Tensor:
    return random_bfloat16(HEADS, NOPE + VALUE, LATENT)


def _absorb_call(absorb: Callable[..., object], tokens: int) -> Call:
    query, weight = random_bfloat16(tokens, HEADS, NOPE + ROPE), _weight()[:, :NOPE]
    rotations = random_rotations(tokens, ROPE)
    return lambda: absorb(query, weight, rotations)


def _expand_call(expand: Callable[..., object], tokens: int) -> Call:
    attended, weight = random_bfloat16(tokens, HEADS, LATENT), _weight()[:, NOPE:].transpose(1, 2)
    return lambda: expand(attended, weight)
