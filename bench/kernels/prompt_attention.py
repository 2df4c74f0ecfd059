"""Attention over prompts of DeepSeek-R1."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from bench.kernels import prompt_peers
from bench.kernels.deepseek_r1 import HEADS, NOPE, ROPE, VALUE
from bench.kernels.inputs import random_bfloat16
from bench.kernels.timing import Case
from kernels.mla_prefill import PrefillPlan, bf16, plan_prefill, triton

SCALE = (NOPE + ROPE) ** -0.5
LENGTHS = ([4096], [8192], [32768], [3500] * 4)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PrefillPlan, float], tuple[torch.Tensor, torch.Tensor]]


def cases() -> Iterable[Case]:
    providers: list[tuple[str, Attend]] = [
        ("deepmesh, CUDA", bf16.mla_prefill),
        ("deepmesh, Triton", triton.mla_prefill),
        ("cuDNN", prompt_peers.cudnn),
    ]
    if prompt_peers.has_flash_attention():
        providers.append(("FlashAttention-3", prompt_peers.flash_attention))
    for lengths in LENGTHS:
        tokens, scores = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
        for provider, attend in providers:
            yield Case(
                shape=f"prefill {len(lengths)} x {lengths[0]}, {HEADS} heads",
                provider=provider,
                make=partial(_call, attend, lengths),
                size_bytes=2.0 * tokens * HEADS * 2 * (NOPE + ROPE + VALUE),
                flops=2.0 * scores * HEADS * (NOPE + ROPE + VALUE),
            )


def _call(attend: Attend, lengths: list[int]) -> Callable[[], object]:
    tokens = sum(lengths)
    plan = plan_prefill(lengths, lengths, torch.device("cuda"))
    query, key = random_bfloat16(tokens, HEADS, NOPE + ROPE), random_bfloat16(tokens, HEADS, NOPE + ROPE)
    value = random_bfloat16(tokens, HEADS, NOPE + VALUE)[:, :, NOPE:]
    return lambda: attend(query, key, value, plan, SCALE)
