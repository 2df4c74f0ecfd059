"""Rows for INT4 experts: multiplied by AWQ's scale of each channel, then e4m3 with one scale for a row or an expert."""

from types import ModuleType

import torch

from kernels.expert_rows import reference
from kernels.moe_permute.layout import Layout
from kernels.w4a8_gemm import ScaledRows
from kernels.w4a8_gemm.operands import TURN

__all__ = ["place_quantized", "place_rows", "quantize_rows", "swiglu_rows"]


def place_rows(
    x: torch.Tensor,
    choices: torch.Tensor,
    expert_count: int,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    first: int = 0,
    elsewhere: int = 0,
) -> tuple[ScaledRows, Layout]:
    """Copy each token, quantized, once per chosen expert among `expert_count` from number `first` on; there are
    `elsewhere` more.

    x: [tokens, width] float32 or bfloat16; choices: [tokens, k] int64, contiguous, distinct within a token; pre_scale:
    [width] float32, by which channels are multiplied; input_scale: [expert_count] float32, all equal, or None for one
    of each row. Values beyond 448 times the scale are clamped to that. Rows that no token has are undefined.
    """
    assert x.shape[0] == choices.shape[0] and x.is_contiguous()
    assert choices.dtype == torch.int64 and choices.is_contiguous()
    assert pre_scale is None or pre_scale.shape == x.shape[1:]
    placed: tuple[ScaledRows, Layout] = _backend(x).place_rows(
        x, choices, expert_count, pre_scale, input_scale, first, elsewhere
    )
    return placed


def quantize_rows(x: torch.Tensor, pre_scale: torch.Tensor | None, input_scale: torch.Tensor | None) -> ScaledRows:
    """Quantize tokens as `place_rows` does, [tokens, width] each, for ranks that place them with `place_quantized`."""
    assert x.is_contiguous() and (pre_scale is None or pre_scale.shape == x.shape[1:])
    rows: ScaledRows = _backend(x).quantize_rows(x, pre_scale, input_scale)
    return rows


def place_quantized(
    x: ScaledRows, choices: torch.Tensor, expert_count: int, first: int, elsewhere: int
) -> tuple[ScaledRows, Layout]:
    """`place_rows` of tokens that are quantized already.

    x: from `quantize_rows`, [tokens, width]. Static scales stay those of x.
    """
    assert x.values.shape[0] == choices.shape[0]
    assert choices.dtype == torch.int64 and choices.is_contiguous()
    rows: tuple[ScaledRows, Layout] = _backend(choices).place_quantized(x, choices, expert_count, first, elsewhere)
    return rows


def swiglu_rows(gate_up: torch.Tensor, layout: Layout, pre_scale: torch.Tensor | None) -> ScaledRows:
    """silu(gate) * up in float32, quantized with one scale for each row. If the scale is one for each expert,
    quantizing needs no whole rows, and the product does it (`kernels.w4a8_gemm.w4a8_feed_forward`).

    gate_up: [rows, 2 * width] or [experts, capacity, 2 * width], as the layout has it, gate and up in turns
    (`kernels.w4a8_gemm.take_turns`); pre_scale: [experts, width] float32, by which each expert's channels are
    multiplied. Rows that no token has are undefined.
    """
    assert gate_up.shape[:-1] == layout.shape and gate_up.shape[-1] % (2 * TURN) == 0 and gate_up.is_contiguous()
    assert pre_scale is None or pre_scale.shape[1] * 2 == gate_up.shape[-1]
    rows: ScaledRows = _backend(gate_up).swiglu_rows(gate_up, layout, pre_scale)
    return rows


def _backend(x: torch.Tensor) -> ModuleType:
    if x.is_cuda:
        # Imported only here: Triton comes with a CUDA build of torch.
        from kernels.expert_rows import triton

        return triton
    return reference
