"""Permutation of tokens by expert in plain torch: the definition."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.act_quant.quantized import Quantized, empty_quantized
from kernels.moe_permute.experts import ExpertOutputs
from kernels.moe_permute.layout import PADDING, ContiguousLayout, ExpandedQuantized, Layout, MaskedLayout


@dataclass(frozen=True, slots=True)
class RowsByExpert:
    """Copies of tokens ordered by expert, where each expert's rows end, and the rows of each token."""

    # [tokens * k, width]
    rows: torch.Tensor
    # [experts] int32
    ends: torch.Tensor
    # [tokens, k] int64
    positions: torch.Tensor


def expand(x: torch.Tensor, experts: torch.Tensor, expert_count: int) -> RowsByExpert:
    chosen = experts.flatten()
    order, positions = _sort(chosen)
    return RowsByExpert(
        rows=x.index_select(0, order // experts.shape[1]),
        ends=_counts(chosen, expert_count).cumsum(0, dtype=torch.int32),
        positions=positions.view_as(experts),
    )


def expand_contiguous(
    x: Quantized, experts: torch.Tensor, expert_count: int, alignment: int, rows: int
) -> ExpandedQuantized:
    return _copy(x, contiguous_layout(experts, expert_count, alignment, rows))


def contiguous_layout(experts: torch.Tensor, expert_count: int, alignment: int, rows: int) -> ContiguousLayout:
    chosen = experts.flatten()
    counts = _counts(chosen, expert_count)
    aligned = (counts + alignment - 1) // alignment * alignment
    positions = (aligned.cumsum(0) - aligned)[chosen] + _places(chosen, counts)
    row_experts = torch.full((rows,), PADDING, dtype=torch.int32, device=experts.device)
    row_experts[positions] = chosen.int()
    return ContiguousLayout(positions=positions.view_as(experts), row_experts=row_experts)


def expand_masked(
    x: Quantized, experts: torch.Tensor, expert_count: int, capacity: int, shared: int = 0
) -> ExpandedQuantized:
    return _copy(x, masked_layout(experts, expert_count, capacity, shared))


def masked_layout(experts: torch.Tensor, expert_count: int, capacity: int, shared: int = 0) -> MaskedLayout:
    chosen = experts.flatten()
    counts = _counts(chosen, expert_count)
    positions = chosen * capacity + _places(chosen, counts)
    return MaskedLayout(positions.view_as(experts), counts.int(), capacity, shared)


def _copy(x: Quantized, layout: Layout) -> ExpandedQuantized:
    out = empty_quantized(*layout.shape, x.values.shape[1], device=x.values.device)
    target = layout.positions.flatten()
    source = torch.arange(len(layout.positions), device=target.device).repeat_interleave(layout.positions.shape[1])
    # As bytes: few operations support one-byte floats.
    out.values.view(torch.uint8).flatten(0, -2)[target] = x.values.view(torch.uint8)[source]
    if isinstance(layout, MaskedLayout):
        out.scales[target // layout.capacity, target % layout.capacity] = x.scales[source]
    else:
        out.scales[target] = x.scales[source]
    return ExpandedQuantized(out, layout)


def combine(outputs: ExpertOutputs) -> torch.Tensor:
    rows = outputs.rows.flatten(0, -2)
    out = functional.embedding_bag(outputs.positions, rows.float(), per_sample_weights=outputs.weights, mode="sum")
    return (out if outputs.shared is None else out + outputs.shared).to(rows.dtype)


def _counts(chosen: torch.Tensor, expert_count: int) -> torch.Tensor:
    # Not bincount, which makes the host wait for the largest value.
    return chosen.new_zeros(expert_count).scatter_add_(0, chosen, torch.ones_like(chosen))


def _sort(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the choices by expert, then by token, and each choice's place in that order."""
    order = chosen.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _places(chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each choice's place among the choices of its expert."""
    _, places = _sort(chosen)
    return places - (counts.cumsum(0) - counts)[chosen]
