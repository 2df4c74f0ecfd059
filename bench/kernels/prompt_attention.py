"""Attention over prompts of DeepSeek-R1."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from bench.kernels import prompt_peers
from bench.kernels.deepseek_r1 import HEADS, LATENT, NOPE, ROPE, VALUE
from bench.kernels.inputs import random_bfloat16
from bench.kernels.timing import Case
from kernels.mla_prefill import PrefillPlan, bf16, fp8, plan_prefill, triton
from kernels.mla_prefill.key_blocks import quantize_blocks

SCALE = (NOPE + ROPE) ** -0.5
LENGTHS = ([4096], [8192], [32768], [3500] * 4)

# Each head's own part of the keys, the part of the keys that all heads share, and values.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cases() -> Iterable[Case]:
    providers: list[tuple[str, Callable[[list[int]], Callable[[], object]]]] = [
        ("deepmesh, CUDA", partial(_call, bf16.mla_prefill)),
        ("deepmesh, Triton", partial(_call, triton.mla_prefill)),
        ("cuDNN", partial(_peer_call, prompt_peers.cudnn)),
    ]
    if prompt_peers.has_flash_attention():
        providers.append(("FlashAttention-3", partial(_peer_call, prompt_peers.flash_attention)))
    for lengths in LENGTHS:
        tokens, scores = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
        shape = f"prefill {len(lengths)} x {lengths[0]}, {HEADS} heads"
        flops = 2.0 * scores * HEADS * (NOPE + ROPE + VALUE)
        size_bytes = 2.0 * tokens * HEADS * 2 * (NOPE + ROPE + VALUE)
        for provider, make in providers:
            yield Case(shape, provider, partial(make, lengths), size_bytes, flops)
        # Attention with the quantization of keys and values, without it, and that quantization alone. Queries are
        # quantized within attention.
        yield Case(shape, "deepmesh, FP8", partial(_fp8_call, lengths), size_bytes, flops, fp8=True)
        yield Case(
            shape, "deepmesh, FP8, keys quantized before", partial(_fp8_attend, lengths), size_bytes, flops, fp8=True
        )
        read, written = HEADS * 2 * (NOPE + VALUE) + 2 * ROPE, HEADS * (NOPE + ROPE + VALUE)
        yield Case(
            f"{shape}, keys and values",
            "deepmesh, to FP8",
            partial(_quantize, lengths),
            float(tokens * (read + written)),
        )


def _call(attend: Callable[..., object], lengths: list[int]) -> Callable[[], object]:
    plan = plan_prefill(lengths, lengths, torch.device("cuda"))
    query, parts = _inputs(lengths)
    out = random_bfloat16(sum(lengths), HEADS, VALUE)
    return lambda: attend(query, *parts, plan, out, SCALE)


def _peer_call(attend: prompt_peers.Attend, lengths: list[int]) -> Callable[[], object]:
    """The peers take keys in one tensor; joining the two parts is not timed."""
    tokens, plan = sum(lengths), plan_prefill(lengths, lengths, torch.device("cuda"))
    query, (_, _, value) = _inputs(lengths)
    key = random_bfloat16(tokens, HEADS, NOPE + ROPE)
    return lambda: attend(query, key, value, plan, SCALE)


def _inputs(lengths: list[int]) -> tuple[torch.Tensor, Parts]:
    """Queries; keys in two parts, and values."""
    tokens = sum(lengths)
    own, value = random_bfloat16(tokens, HEADS, NOPE + VALUE).split([NOPE, VALUE], dim=2)
    return random_bfloat16(tokens, HEADS, NOPE + ROPE), (own, random_bfloat16(tokens, LATENT + ROPE)[:, LATENT:], value)


def _fp8_inputs(lengths: list[int]) -> tuple[torch.Tensor, Parts, PrefillPlan]:
    return *_inputs(lengths), plan_prefill(lengths, lengths, torch.device("cuda"), quantized=True)


def _fp8_call(lengths: list[int]) -> Callable[[], object]:
    query, parts, plan = _fp8_inputs(lengths)
    out = random_bfloat16(sum(lengths), HEADS, VALUE)
    return lambda: fp8.mla_prefill(query, *parts, plan, out, SCALE)


def _fp8_attend(lengths: list[int]) -> Callable[[], object]:
    query, parts, plan = _fp8_inputs(lengths)
    blocks, out = quantize_blocks(*parts, plan), random_bfloat16(sum(lengths), HEADS, VALUE)
    return lambda: fp8.attend(query, blocks, plan, out, SCALE)


def _quantize(lengths: list[int]) -> Callable[[], object]:
    _, parts, plan = _fp8_inputs(lengths)
    return lambda: quantize_blocks(*parts, plan)
