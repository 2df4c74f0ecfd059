"""The forms of rows, as the package takes them and gives them back."""

import torch

from engine.model.activations import Sent
from engine.model.deep_ep.interface import Rows
from kernels.act_quant import GROUP, Quantized
from kernels.act_quant.quantized import aligned_rows
from kernels.w4a8_gemm import ScaledRows


def packed(rows: Sent) -> Rows:
    """The rows as the package takes them."""
    return rows if isinstance(rows, torch.Tensor) else (rows.values, _scales_of_groups(rows))


def unpacked(received: Rows, rows: Sent) -> Sent:
    """The received rows, in the form of the `rows` that were sent."""
    if isinstance(received, torch.Tensor):
        return received
    values, scales = received
    if isinstance(rows, ScaledRows):
        return ScaledRows(values, rows.scales if rows.static else scales[:, 0].contiguous(), rows.static)
    return _quantized(values, scales)


def _scales_of_groups(rows: Quantized | ScaledRows) -> torch.Tensor:
    """A scale for each group. Rows that have fewer scales repeat them, which takes 3% more bytes."""
    if isinstance(rows, Quantized):
        return rows.scales.contiguous()
    tokens, width = rows.values.shape
    # All ranks have the static scale, so ones are sent in its place.
    scales = rows.scales.new_ones(tokens) if rows.static else rows.scales
    return scales.unsqueeze(1).repeat(1, width // GROUP)


def _quantized(values: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """scales: [rows, groups]."""
    rows, groups = scales.shape
    columns = scales.new_empty(groups, aligned_rows(rows))[:, :rows].t()
    return Quantized(values, columns.copy_(scales))
