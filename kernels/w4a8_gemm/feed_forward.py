"""The experts' whole feed-forward layers: gate and up, SwiGLU, quantization, and down."""

from dataclasses import dataclass

import torch

from kernels.w4a8_gemm.operands import Int4Experts

# How many tiles of rows one call can have: enough for all masked layouts that `kernels.moe_permute` chooses, and for
# contiguous ones of half a million rows.
MOST_ROW_TILES = 4608


@dataclass(frozen=True, slots=True)
class Int4FeedForward:
    """Weights of experts whose second input has a static scale, so that it can be quantized where it is computed."""

    # [experts, 2 * width, hidden], the outputs in turns (`take_turns`).
    gate_up: Int4Experts
    # [experts, hidden, width].
    down: Int4Experts
    # [experts] float32: the scale of each expert's inputs of `down`.
    input_scales: torch.Tensor
    # [experts, width] float32: AWQ's scale of the channel, or 1, divided by the expert's input scale.
    factors: torch.Tensor
    # [MOST_ROW_TILES] int32, zero between calls: the kernels' own counters. Calls must not overlap.
    progress: torch.Tensor

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, for both products."""
        return sum(weight.tiles[0].numel() for weight in (self.gate_up, self.down))


def int4_feed_forward(
    gate_up: Int4Experts, down: Int4Experts, input_scales: torch.Tensor, pre_scales: torch.Tensor | None
) -> Int4FeedForward:
    """input_scales: [experts] float32; pre_scales: [experts, width] float32, by which channels are multiplied."""
    experts, _, width = down.shape
    assert gate_up.shape[:2] == (experts, 2 * width) and input_scales.shape == (experts,)
    assert gate_up.group == down.group
    ones = torch.ones(experts, width, device=input_scales.device) if pre_scales is None else pre_scales
    factors = ones * input_scales.reciprocal().unsqueeze(1)
    progress = torch.zeros(MOST_ROW_TILES, dtype=torch.int32, device=input_scales.device)
    return Int4FeedForward(gate_up, down, input_scales.contiguous(), factors, progress)
