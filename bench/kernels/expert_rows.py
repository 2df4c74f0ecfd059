"""Rows for the INT4 experts of DeepSeek-R1, as one of eight ranks holds them: fused, and in separate kernels.

The separate kernels are the layout, copies in bfloat16, the multiplication by the channels' scales, and quantization.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import CHOICES, EXPERT_WIDTH, HIDDEN
from bench.kernels.inputs import random_bfloat16
from bench.kernels.moe import ROUTED
from bench.kernels.timing import Case
from kernels.expert_rows import place_rows, swiglu_rows
from kernels.expert_rows.triton import place_in
from kernels.moe_permute import MaskedLayout, choose_layout
from kernels.moe_permute.triton import contiguous_layout

TOKENS = (8, 32, 64, 128, 256, 4096, 16384)
Call = Callable[[], object]


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        rows = tokens * CHOICES
        for provider, make in {"fused": _fused, "separate": _separate}.items():
            size_bytes = tokens * HIDDEN * 2 + rows * HIDDEN
            yield Case(f"place and quantize by {tokens}", provider, partial(make, tokens), size_bytes)
        yield Case(f"gate and quantize by {tokens}", "fused", partial(_gate, tokens), rows * EXPERT_WIDTH * (2 * 2 + 1))


def _choices(tokens: int) -> torch.Tensor:
    return torch.rand(tokens, ROUTED, device="cuda").argsort(dim=1)[:, :CHOICES].contiguous()


def _static_scale() -> torch.Tensor:
    return torch.full((ROUTED,), 0.01, device="cuda")


def _fused(tokens: int) -> Call:
    x, choices, pre_scale = random_bfloat16(tokens, HIDDEN), _choices(tokens), torch.rand(HIDDEN, device="cuda")
    input_scale = _static_scale()
    return lambda: place_rows(x, choices, ROUTED, pre_scale, input_scale)


def _separate(tokens: int) -> Call:
    x, choices, pre_scale = random_bfloat16(tokens, HIDDEN), _choices(tokens), random_bfloat16(HIDDEN)
    input_scale, copies = _static_scale(), choices.numel()
    # The row of each copy, as a layout would give it, and the token of each row. Any tokens will do here.
    rows, sources = torch.arange(copies, device="cuda").unsqueeze(1), torch.randint(tokens, (copies,), device="cuda")
    dense = MaskedLayout(rows, torch.full((1,), copies, dtype=torch.int32, device="cuda"), copies)

    def place() -> object:
        contiguous_layout(choices, ROUTED, 128, (copies // 128 + ROUTED) * 128)
        return place_in(dense, x.index_select(0, sources) * pre_scale, None, input_scale)

    return place


def _gate(tokens: int) -> Call:
    layout = choose_layout(_choices(tokens), ROUTED)
    gate_up = random_bfloat16(*layout.shape, 2 * EXPERT_WIDTH)
    pre_scale = torch.rand(ROUTED, EXPERT_WIDTH, device="cuda")
    return lambda: swiglu_rows(gate_up, layout, pre_scale)
