"""Permutation of tokens by expert in plain torch: the definition."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.act_quant.quantized import Quantized, empty_quantized
from kernels.moe_permute.experts import ExpertOutputs
from kernels.moe_permute.layout import NOWHERE, PADDING, ContiguousLayout, ExpandedQuantized, Layout, MaskedLayout


@dataclass(frozen=True, slots=True)
class RowsByExpert:
    """Copies of tokens ordered by expert, where each expert's rows end, and the rows of each token."""

    # [tokens * k, width]
    rows: torch.Tensor
    # [experts] int32
    ends: torch.Tensor
    # [tokens, k] int64
    positions: torch.Tensor


def expand(x: torch.Tensor, experts: torch.Tensor, expert_count: int, first: int = 0) -> RowsByExpert:
    chosen = _own(experts, expert_count, first)
    order, places = _sort(chosen)
    ends = _counts(chosen, expert_count).cumsum(0, dtype=torch.int32)
    if not x.is_cuda:
        # Choices of experts elsewhere come last.
        order = order[: int(ends[-1])]
    positions = places.where(chosen < expert_count, NOWHERE)
    return RowsByExpert(x.index_select(0, order // experts.shape[1]), ends, positions.view_as(experts))


def expand_contiguous(
    x: Quantized, experts: torch.Tensor, expert_count: int, alignment: int, rows: int, first: int = 0
) -> ExpandedQuantized:
    return _copy(x, contiguous_layout(experts, expert_count, alignment, rows, first))


def contiguous_layout(
    experts: torch.Tensor, expert_count: int, alignment: int, rows: int, first: int = 0
) -> ContiguousLayout:
    chosen = _own(experts, expert_count, first)
    counts = _counts(chosen, expert_count)
    aligned = (counts + alignment - 1) // alignment * alignment
    starts = functional.pad(aligned.cumsum(0) - aligned, (0, 1))
    positions = (starts[chosen] + _places(chosen, counts)).where(chosen < expert_count, NOWHERE)
    row_experts = torch.full((rows,), PADDING, dtype=torch.int32, device=experts.device)
    kept = positions != NOWHERE
    row_experts[positions[kept]] = chosen[kept].int()
    return ContiguousLayout(positions=positions.view_as(experts), row_experts=row_experts)


def expand_masked(
    x: Quantized,
    experts: torch.Tensor,
    expert_count: int,
    capacity: int,
    shared: int = 0,
    first: int = 0,
    elsewhere: int = 0,
) -> ExpandedQuantized:
    return _copy(x, masked_layout(experts, expert_count, capacity, shared, first, elsewhere))


def masked_layout(
    experts: torch.Tensor, expert_count: int, capacity: int, shared: int = 0, first: int = 0, elsewhere: int = 0
) -> MaskedLayout:
    chosen = _own(experts, expert_count, first)
    counts = _counts(chosen, expert_count)
    positions = (chosen * capacity + _places(chosen, counts)).where(chosen < expert_count, NOWHERE)
    return MaskedLayout(positions.view_as(experts), counts.int(), capacity, shared, elsewhere)


def _copy(x: Quantized, layout: Layout) -> ExpandedQuantized:
    out = empty_quantized(*layout.shape, x.values.shape[-1], device=x.values.device)
    source, target = kept_rows(layout)
    # As bytes: few operations support one-byte floats.
    out.values.view(torch.uint8).flatten(0, -2)[target] = x.values.view(torch.uint8)[source]
    if isinstance(layout, MaskedLayout):
        out.scales[target // layout.capacity, target % layout.capacity] = x.scales[source]
    else:
        out.scales[target] = x.scales[source]
    return ExpandedQuantized(out, layout)


def kept_rows(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The token and the row of each choice that has one."""
    positions = layout.positions
    tokens, choices = (positions != NOWHERE).nonzero(as_tuple=True)
    return tokens, positions[tokens, choices]


def combine(
    outputs: ExpertOutputs, part: torch.Tensor | None = None, first: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    rows, positions, weights = outputs.rows.flatten(0, -2), outputs.positions, outputs.weights
    if (positions == NOWHERE).any():
        tokens, choices = (positions != NOWHERE).nonzero(as_tuple=True)
        values = rows[positions[tokens, choices]].float() * weights[tokens, choices].unsqueeze(1)
        sums = torch.zeros(outputs.shape, dtype=torch.float32, device=rows.device).index_add_(0, tokens, values)
    else:
        sums = functional.embedding_bag(positions, rows.float(), per_sample_weights=weights, mode="sum")
    if part is not None:
        sums[first : first + len(part)] += part
    if outputs.shared is not None:
        sums += outputs.shared
    return sums.to(rows.dtype) if out is None else out.copy_(sums)


def _own(experts: torch.Tensor, expert_count: int, first: int) -> torch.Tensor:
    """The choices, flat, counted from the first placed expert; `expert_count` stands for all others."""
    chosen = experts.flatten() - first
    return chosen.where((chosen >= 0) & (chosen < expert_count), expert_count)


def _counts(chosen: torch.Tensor, expert_count: int) -> torch.Tensor:
    # Not bincount, which makes the host wait for the largest value.
    return chosen.new_zeros(expert_count + 1).scatter_add_(0, chosen, torch.ones_like(chosen))[:expert_count]


def _sort(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the choices by expert, then by token, and each choice's place in that order."""
    order = chosen.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _places(chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each choice's place among the choices of its expert."""
    _, places = _sort(chosen)
    return places - functional.pad(counts.cumsum(0) - counts, (0, 1))[chosen]
