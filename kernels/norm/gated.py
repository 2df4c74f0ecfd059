"""What a layer of experts reads of its rows."""

from typing import NamedTuple

import torch

from kernels.act_quant import Quantized


class Gated(NamedTuple):
    """Rows to which a delta was added, normalized, with the logits of a gate."""

    # The residual, [rows, width].
    residual: torch.Tensor
    # Normalized: [rows, width], and the same in groups of FP8, if asked for.
    plain: torch.Tensor
    quantized: Quantized | None
    # [shares, rows, experts] float32, as `kernels.moe_gate.moe_gate` takes them.
    logits: torch.Tensor
