"""The experts' INT4 linear layers in plain torch, the definition."""

import torch

from kernels.moe_permute.layout import ContiguousLayout, Layout
from kernels.w4a8_gemm.activations import ScaledRows
from kernels.w4a8_gemm.weight import GROUP, Int4Experts, unpack_tiles


def w4a8_grouped_gemm(x: ScaledRows, weight: Int4Experts, layout: Layout) -> torch.Tensor:
    out = torch.empty(*layout.shape, weight.shape[1], dtype=torch.bfloat16, device=x.values.device)
    for expert, tiles in enumerate(weight.tiles):
        if isinstance(layout, ContiguousLayout):
            rows = (layout.row_experts == expert).nonzero().flatten()
            at: tuple[torch.Tensor | int | slice, ...] = (rows,)
        else:
            at = (expert, slice(int(layout.counts[expert])))
        values = x.values.view(torch.uint8)[at].view(torch.float8_e4m3fn)
        if len(values):
            scales = x.scales[expert] if x.static else x.scales[at].unsqueeze(1)
            out[at] = (values.float() * scales @ dequantize(tiles).t()).bfloat16()
    return out


def dequantize(tiles: torch.Tensor) -> torch.Tensor:
    """[..., outputs / 64, inputs / 128, 4224] uint8 to [..., outputs, inputs] float32."""
    integers, scales = unpack_tiles(tiles)
    return integers.float() * scales.float().repeat_interleave(GROUP, dim=-1)
