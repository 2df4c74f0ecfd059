"""INT4 experts of DeepSeek-R1 as one of eight ranks holds them, all with the same number of rows, and deep_gemm's
FP8 experts.

The floor of both is that of the INT4 product. Then come whole feed-forward layers: in one kernel, and as two products
one after the other, without the work between them. Such layers are also timed with few experts that have one to eight
rows each while the others have none, as in steps of few tokens; and with a quarter of every expert's width, as four
ranks may divide it, where tokens also come as the gate leaves them: the kernel of one or two, and their placement
and the kernel that makes tiles.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import CHOICES, EXPERT_LAYERS, EXPERT_WIDTH, EXPERTS, HIDDEN
from bench.kernels.inputs import random_weight
from bench.kernels.moe import ROUTED
from bench.kernels.timing import Case
from kernels.act_quant import empty_quantized
from kernels.expert_rows import place_rows
from kernels.grouped_gemm import deep_gemm
from kernels.moe_permute import MaskedLayout
from kernels.w4a8_gemm import (
    Int4Experts,
    Int4FeedForward,
    ScaledRows,
    few_tokens,
    few_tokens_feed_forward,
    int4_experts,
    int4_feed_forward,
    w4a8_feed_forward,
    w4a8_grouped_gemm,
)
from kernels.w4a8_gemm.operands import TILE_INPUTS, TILE_OUTPUTS, WEIGHT_BYTES, tile_bytes

ROWS = (1, 8, 16, 32, 64, 96, 128, 256, 1024, 4096)
# How many experts have rows.
TOUCHED = (1, 2, 3, 4, 5, 6, 7, 8, 11)
# The ranks that divide every expert's width, and how many of all experts four and eight tokens choose.
WIDTH_RANKS, TOUCHED_OF_ALL = 4, (30, 57)
# Bytes of a weight and its share of a scale.
WEIGHT_SIZE = tile_bytes(TILE_INPUTS) / (TILE_OUTPUTS * TILE_INPUTS)
Call = Callable[[], object]
Form = Callable[[Int4FeedForward, MaskedLayout], Call]


def cases() -> Iterator[Case]:
    for layer, (outputs, inputs) in EXPERT_LAYERS.items():
        for rows in ROWS:
            for provider, make in _providers(rows, outputs, inputs).items():
                yield Case(
                    shape=f"INT4 experts' {layer} {ROUTED}x{outputs}x{inputs}, {rows} rows each",
                    provider=provider,
                    make=make,
                    size_bytes=ROUTED * (outputs * inputs * WEIGHT_SIZE + rows * (inputs + 2 * outputs)),
                    flops=2 * ROUTED * rows * outputs * inputs,
                    fp8=True,
                )
    forms: dict[str, Form] = {"one kernel": _together, "two products": _apart}
    for rows in ROWS:
        for provider, form in forms.items():
            shape = f"INT4 experts' whole layers, {ROUTED} of {HIDDEN} by {EXPERT_WIDTH}, {rows} rows each"
            yield _whole_layers(shape, provider, partial(_even, form, rows), ROUTED, ROUTED * rows)
    yield from _few_touched(ROUTED, EXPERT_WIDTH, TOUCHED)
    yield from _few_touched(EXPERTS, EXPERT_WIDTH // WIDTH_RANKS, TOUCHED_OF_ALL)
    yield from _few_tokens(EXPERT_WIDTH // WIDTH_RANKS)


def _few_touched(experts: int, width: int, counts: tuple[int, ...]) -> Iterator[Case]:
    forms: dict[str, Form] = {"one kernel": _together, "two products": _apart}
    few = _FewTouched(experts, width)
    for touched in counts:
        for provider, form in forms.items():
            shape = f"INT4 experts' whole layers, {experts} of {HIDDEN} by {width}, {touched} have a few rows"
            rows = sum(_few_rows(touched))
            yield _whole_layers(shape, provider, partial(few.layer, form, touched), touched, rows, width)


def _few_tokens(width: int) -> Iterator[Case]:
    few = _FewTokens(width)
    for tokens in range(1, few_tokens.MOST_TOKENS + 1):
        for provider, form in (("few tokens", _unplaced), ("placed, in tiles", _placed)):
            shape = (
                f"INT4 experts' whole layers, {EXPERTS} of {HIDDEN} by {width}, {CHOICES} for each of {tokens} tokens"
            )
            copies = tokens * CHOICES
            yield _whole_layers(shape, provider, partial(few.layer, form, tokens), copies, copies, width)


def _whole_layers(
    shape: str, provider: str, make: Callable[[], Call], experts: int, rows: int, width: int = EXPERT_WIDTH
) -> Case:
    """A case of whole layers: `experts` experts, with `rows` rows in all."""
    weights = 3 * HIDDEN * width
    return Case(
        shape=shape,
        provider=provider,
        make=make,
        size_bytes=experts * weights * WEIGHT_SIZE + rows * 3 * HIDDEN,
        flops=2 * rows * weights,
        fp8=True,
    )


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


class _FewTouched:
    """Layers with the same weights. Each call has rows for other experts, whose weights are not in the cache."""

    def __init__(self, experts: int, width: int) -> None:
        self._shape = experts, width
        self._experts: Int4FeedForward | None = None
        self._first = 0

    def layer(self, form: Form, touched: int) -> Call:
        self._experts = self._experts or _feed_forward(*self._shape)
        experts, _ = self._shape
        counts = torch.zeros(experts, dtype=torch.int32)
        counts[(self._first + torch.arange(touched)) % experts] = torch.tensor(_few_rows(touched), dtype=torch.int32)
        self._first += touched
        return form(self._experts, MaskedLayout(torch.zeros(1, CHOICES, dtype=torch.int64), counts.cuda(), 64))


class _FewTokens:
    """Layers with the same weights. Tokens of each call choose other experts, whose weights are not in the cache."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._experts: Int4FeedForward | None = None
        self._first = 0

    def layer(self, form: Callable[[Int4FeedForward, torch.Tensor, torch.Tensor], object], tokens: int) -> Call:
        self._experts = self._experts or _feed_forward(EXPERTS, self._width)
        choices = (self._first + torch.arange(tokens * CHOICES).view(tokens, CHOICES)) % EXPERTS
        self._first += tokens * CHOICES
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        return partial(form, self._experts, x, choices.cuda())


def _unplaced(experts: Int4FeedForward, x: torch.Tensor, choices: torch.Tensor) -> object:
    return few_tokens_feed_forward(x, choices, experts, None, experts.input_scales)


def _placed(experts: Int4FeedForward, x: torch.Tensor, choices: torch.Tensor) -> object:
    rows, layout = place_rows(x, choices, EXPERTS, None, experts.input_scales)
    return w4a8_feed_forward(rows, experts, layout)


def _few_rows(touched: int) -> list[int]:
    return [1 + index % 8 for index in range(touched)]


def _even(form: Form, rows: int) -> Call:
    return form(_feed_forward(), even_layout(rows))


def _together(experts: Int4FeedForward, layout: MaskedLayout) -> Call:
    x = _static_rows(layout, HIDDEN, experts)
    return lambda: w4a8_feed_forward(x, experts, layout)


def _apart(experts: Int4FeedForward, layout: MaskedLayout) -> Call:
    x, inner = _static_rows(layout, HIDDEN, experts), _static_rows(layout, experts.down.shape[2], experts)
    return lambda: (w4a8_grouped_gemm(x, experts.gate_up, layout), w4a8_grouped_gemm(inner, experts.down, layout))


def _feed_forward(experts: int = ROUTED, width: int = EXPERT_WIDTH) -> Int4FeedForward:
    input_scales = torch.full((experts,), 0.01, device="cuda")
    matrices = random_int4(2 * width, HIDDEN, experts), random_int4(HIDDEN, width, experts)
    return int4_feed_forward(*matrices, input_scales, None)


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
    # With this many positions, the rows that the kernel expects for an expert are the real ones.
    positions = torch.zeros(rows, ROUTED, dtype=torch.int64, device="cuda")
    return MaskedLayout(positions, torch.full((ROUTED,), rows, dtype=torch.int32, device="cuda"), capacity)


def random_int4(
    outputs: int, inputs: int, experts: int = ROUTED, *, group: int = TILE_INPUTS, minimum: bool = False
) -> Int4Experts:
    """Random codes, that of -8 only if `minimum`, and scales up to 1."""
    shape = (experts, outputs // TILE_OUTPUTS, inputs // TILE_INPUTS, tile_bytes(group))
    tiles = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
    if not minimum:
        # No code is -0, which means -8: each magnitude has its lowest bit set.
        tiles[..., :WEIGHT_BYTES] |= 0x11
    tiles[..., WEIGHT_BYTES:].view(torch.bfloat16).uniform_()
    return int4_experts(tiles)
