"""The gate's linear layer, whose results are float32 whatever its operands are."""

from dataclasses import dataclass

import torch
from torch.nn import functional

# Of 32 tokens and 32 experts each: 256 tokens and 256 experts, as many as are shared out by programs.
SHARED_TILES = 64


@dataclass(frozen=True, slots=True)
class GateWeight:
    # [experts, width], bfloat16 or float32.
    values: torch.Tensor
    # [64] int32, zero between calls: programs that share a tile of the logits count themselves here. So a weight
    # multiplies one batch at a time.
    arrivals: torch.Tensor


def gate_weight(values: torch.Tensor) -> GateWeight:
    return GateWeight(values, torch.zeros(SHARED_TILES, dtype=torch.int32, device=values.device))


def gate_logits(hidden: torch.Tensor, weight: GateWeight) -> torch.Tensor:
    """hidden: [tokens, width]. Returns [tokens, experts] float32.

    bfloat16 operands on a GPU are multiplied as they are and summed in float32: their products are exact there. For few
    tokens ours, whose sums are shared out by programs; cuBLAS for many.
    """
    values = weight.values
    assert hidden.shape[1] == values.shape[1] and hidden.stride(1) == 1 and values.is_contiguous()
    if not hidden.is_cuda or not hidden.dtype == values.dtype == torch.bfloat16:
        return functional.linear(hidden.float(), values.float())
    # Imported here: a machine without a GPU may lack it.
    from kernels.moe_gate import triton_logits

    if triton_logits.tiles(hidden.shape[0], values.shape[0]) <= SHARED_TILES:
        return triton_logits.gate_logits(hidden, values, weight.arrivals)
    return torch.mm(hidden, values.t(), out_dtype=torch.float32)
