"""The experts' INT4 linear layers in plain torch, the definition."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from kernels.moe_permute.layout import ContiguousLayout, Layout
from kernels.w4a8_gemm.feed_forward import Int4FeedForward
from kernels.w4a8_gemm.operands import Int4Experts, ScaledRows, gate_and_up, group_of, unpack_tiles

LARGEST = torch.finfo(torch.float8_e4m3fn).max

# Where an expert's rows lie in tensors of a layout.
Place = tuple[torch.Tensor | int | slice, ...]


def w4a8_grouped_gemm(x: ScaledRows, weight: Int4Experts, layout: Layout) -> torch.Tensor:
    out = torch.empty(*layout.shape, weight.shape[1], dtype=torch.bfloat16, device=x.values.device)
    for _, at, outputs in _outputs(x, weight, layout):
        out[at] = outputs.bfloat16()
    return out


def w4a8_feed_forward(x: ScaledRows, experts: Int4FeedForward, layout: Layout) -> torch.Tensor:
    # As bytes: few operations support one-byte floats.
    inner = torch.empty(*layout.shape, experts.down.shape[2], dtype=torch.uint8, device=x.values.device)
    for expert, at, outputs in _outputs(x, experts.gate_up, layout):
        gate, up = gate_and_up(outputs)
        gated = functional.silu(gate) * up * experts.factors[expert]
        inner[at] = gated.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    rows = ScaledRows(inner.view(torch.float8_e4m3fn), experts.input_scales, static=True)
    return w4a8_grouped_gemm(rows, experts.down, layout)


def _outputs(x: ScaledRows, weight: Int4Experts, layout: Layout) -> Iterator[tuple[int, Place, torch.Tensor]]:
    """For each expert that has rows: where they lie, and their outputs, [rows, outputs] float32."""
    for expert, tiles in enumerate(weight.tiles):
        if isinstance(layout, ContiguousLayout):
            at: Place = ((layout.row_experts == expert).nonzero().flatten(),)
        else:
            at = (expert, slice(int(layout.counts[expert])))
        values = x.values.view(torch.uint8)[at].view(torch.float8_e4m3fn)
        if len(values):
            scales = x.scales[expert] if x.static else x.scales[at].unsqueeze(1)
            yield expert, at, values.float() * scales @ dequantize(tiles).t()


def dequantize(tiles: torch.Tensor) -> torch.Tensor:
    """[..., outputs / 64, inputs / 128, bytes] uint8 to [..., outputs, inputs] float32."""
    integers, scales = unpack_tiles(tiles)
    return integers.float() * scales.float().repeat_interleave(group_of(tiles), dim=-1)
