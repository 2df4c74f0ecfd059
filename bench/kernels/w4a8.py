"""INT4 experts of DeepSeek-R1 as one of eight ranks holds them, each with as many rows: beside FP8's of deep_gemm.

The floor is that of the INT4 product for both. Last the whole feed-forward layers: in one kernel, and the two products
one after the other, without what would be between them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import EXPERT_LAYERS, EXPERT_WIDTH, HIDDEN
from bench.kernels.inputs import random_weight
from bench.kernels.moe import ROUTED
from bench.kernels.timing import Case
from kernels.act_quant import empty_quantized
from kernels.grouped_gemm import deep_gemm
from kernels.moe_permute import MaskedLayout
from kernels.w4a8_gemm import (
    Int4Experts,
    Int4FeedForward,
    ScaledRows,
    int4_experts,
    int4_feed_forward,
    w4a8_feed_forward,
    w4a8_grouped_gemm,
)
from kernels.w4a8_gemm.weight import GROUP, TILE_BYTES, TILE_OUTPUTS, WEIGHT_BYTES

ROWS = (1, 8, 16, 32, 64, 96, 128, 256, 1024, 4096)
Call = Callable[[], object]


def cases() -> Iterator[Case]:
    for layer, (outputs, inputs) in EXPERT_LAYERS.items():
        for rows in ROWS:
            for provider, make in _providers(rows, outputs, inputs).items():
                yield Case(
                    shape=f"INT4 experts' {layer} {ROUTED}x{outputs}x{inputs}, {rows} rows each",
                    provider=provider,
                    make=make,
                    size_bytes=ROUTED * (outputs * inputs * TILE_BYTES / (TILE_OUTPUTS * GROUP)
                                         + rows * (inputs + 2 * outputs)),
                    flops=2 * ROUTED * rows * outputs * inputs,
                    fp8=True,
                )  # fmt: skip
    for rows in ROWS:
        for provider, form in {"one kernel": _together, "two products": _apart}.items():
            yield Case(
                shape=f"INT4 experts' whole layers, {ROUTED} of {HIDDEN} by {EXPERT_WIDTH}, {rows} rows each",
                provider=provider,
                make=partial(form, rows),
                size_bytes=ROUTED * (3 * HIDDEN * EXPERT_WIDTH * TILE_BYTES / (TILE_OUTPUTS * GROUP)
                                     + rows * 3 * HIDDEN),
                flops=6 * ROUTED * rows * HIDDEN * EXPERT_WIDTH,
                fp8=True,
            )  # fmt: skip


def _providers(rows: int, outputs: int, inputs: int) -> dict[str, Callable[[], Call]]:
    found: dict[str, Callable[[], Call]] = {"deepmesh": lambda: _int4(rows, outputs, inputs)}
    if deep_gemm.available():
        found["deep_gemm, FP8"] = lambda: _fp8(rows, outputs, inputs)
    return found


def _int4(rows: int, outputs: int, inputs: int) -> Call:
    layout, weight = even_layout(rows), random_int4(outputs, inputs)
    values = torch.randn(*layout.shape, inputs, device="cuda").to(torch.float8_e4m3fn)
    x = ScaledRows(values, torch.rand(layout.shape, device="cuda"), static=False)
    return lambda: w4a8_grouped_gemm(x, weight, layout)


def _together(rows: int) -> Call:
    experts, layout = _feed_forward(), even_layout(rows)
    x = _static_rows(layout, HIDDEN, experts)
    return lambda: w4a8_feed_forward(x, experts, layout)


def _apart(rows: int) -> Call:
    experts, layout = _feed_forward(), even_layout(rows)
    x, inner = _static_rows(layout, HIDDEN, experts), _static_rows(layout, EXPERT_WIDTH, experts)
    return lambda: (w4a8_grouped_gemm(x, experts.gate_up, layout), w4a8_grouped_gemm(inner, experts.down, layout))


def _feed_forward() -> Int4FeedForward:
    input_scales = torch.full((ROUTED,), 0.01, device="cuda")
    return int4_feed_forward(
        random_int4(2 * EXPERT_WIDTH, HIDDEN), random_int4(HIDDEN, EXPERT_WIDTH), input_scales, None
    )


def _static_rows(layout: MaskedLayout, width: int, experts: Int4FeedForward) -> ScaledRows:
    values = torch.randn(*layout.shape, width, device="cuda").to(torch.float8_e4m3fn)
    return ScaledRows(values, experts.input_scales, static=True)


def _fp8(rows: int, outputs: int, inputs: int) -> Call:
    layout, weight = even_layout(rows), random_weight(ROUTED, outputs, inputs)
    x = empty_quantized(*layout.shape, inputs, device=torch.device("cuda"))
    x.values.copy_(torch.randn(*layout.shape, inputs, device="cuda"))
    x.scales.copy_(torch.rand(x.scales.shape, device="cuda"))
    return lambda: deep_gemm.grouped_fp8_gemm(x, weight, layout)


def even_layout(rows: int) -> MaskedLayout:
    """The same number of rows for each expert."""
    capacity = 64 if rows <= 64 else -(-rows // 128) * 128
    # As many positions as make the expected rows the real ones.
    positions = torch.zeros(rows, ROUTED, dtype=torch.int64, device="cuda")
    return MaskedLayout(positions, torch.full((ROUTED,), rows, dtype=torch.int32, device="cuda"), capacity)


def random_int4(outputs: int, inputs: int) -> Int4Experts:
    """Codes of all kinds but that of -8, and scales up to 1."""
    shape = (ROUTED, outputs // TILE_OUTPUTS, inputs // GROUP, TILE_BYTES)
    tiles = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
    # No code is -0, which means -8: each magnitude has its lowest bit set.
    tiles[..., :WEIGHT_BYTES] |= 0x11
    tiles[..., WEIGHT_BYTES:].view(torch.bfloat16).uniform_()
    return int4_experts(tiles)
